"""Comparing what ranks hold of the same values, each as it is on its own rank.

State that is put together for a checkpoint takes each value from the one rank that owns it, so that replicas which
have drifted apart don't show there. Here every rank's own copy is looked at: the values of its shards, owned or not,
and what its forward computes from one and the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_core import Booster

_Place = tuple[str, tuple[tuple[int, int], ...], tuple[int, int]]


@dataclass
class LocalView:
    """What one rank has of a model.

    Attributes:
        shards: A copy of the values of each shard of this rank, by name, box, and range inside the flattened box.
        outputs: What the model returns for a batch that is the same on every rank, without dropout.
    """

    shards: dict[_Place, Tensor]
    outputs: Tensor


def look_locally(booster: Booster, model: Any, batch: Tensor) -> LocalView:
    """Return what this rank has of a model.

    Args:
        booster: Has boosted the model.
        model: What ``boost`` returned, called as ``model(batch)`` and returning a tensor.
        batch: The same on every rank.

    Collective: as the plugin's forward.
    """
    shards: dict[_Place, Tensor] = {}
    for shard in booster.state_adapter(model).model_shards():
        box = tuple((int(start), int(stop)) for start, stop in shard.box)
        start, stop = shard.flat_range
        shards[shard.name, box, (int(start), int(stop))] = shard.data.detach().cpu().clone()
    was_training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(batch)
    model.train(was_training)
    return LocalView(shards, outputs.detach().cpu().clone())


def assert_equal_replicas(views: Sequence[LocalView]) -> None:
    """Assert that ranks which hold the same part of a tensor hold the same values, bit for bit.

    Raises:
        AssertionError: If a shard's values, or the outputs for the same batch, differ between two ranks; names the
            tensors and the ranks.

    Collective: none; called by a test's own process.
    """
    first_seen: dict[_Place, tuple[int, Tensor]] = {}
    drifted: dict[str, tuple[int, int]] = {}
    for rank, view in enumerate(views):
        for place, values in view.shards.items():
            holder, theirs = first_seen.setdefault(place, (rank, values))
            if not _identical(values, theirs):
                drifted.setdefault(place[0], (holder, rank))
    if drifted:
        listed = ", ".join(f"{name} (ranks {one} and {other})" for name, (one, other) in sorted(drifted.items()))
        msg = f"Replicas of {len(drifted)} tensors have drifted apart: {listed}"
        raise AssertionError(msg)
    for rank, view in enumerate(views[1:], start=1):
        if not _identical(view.outputs, views[0].outputs):
            msg = (
                f"Ranks 0 and {rank} compute different outputs from the same batch: the parameters or buffers that "
                "their forward reads have drifted apart."
            )
            raise AssertionError(msg)


def _identical(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
