"""Compare the replicas of a model's values, each as stored on its own rank.

A checkpoint takes each value from the one rank that owns it, so it does not show replicas that differ. These
functions compare every rank's own copy: the values of its shards, owned or not, and its outputs for the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from booster_core.state import replica_digests
from booster_testing.training import logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_core import Booster
    from booster_core.state import Place


@dataclass
class LocalView:
    """The shards of a model on one rank, and its outputs.

    Attributes:
        shards: A digest of the values of each part of a tensor on this rank.
        outputs: The model's outputs for a batch that is the same on every rank, without dropout.
    """

    shards: dict[Place, int]
    outputs: Tensor


def look_locally(booster: Booster, model: Any, batch: Tensor) -> LocalView:
    """Return this rank's shards of a model, and its outputs.

    Args:
        booster: The Booster of the model.
        model: The boosted model; called as ``model(batch)``, it must return logits.
        batch: The same on every rank.

    Collective: as the plugin's forward.
    """
    shards = dict(replica_digests(booster.state_adapter(model).model_shards()))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        outputs = logits_of(model(batch))
    model.train(was_training)
    return LocalView(shards, outputs.detach().cpu().clone())


def assert_equal_replicas(views: Sequence[LocalView]) -> None:
    """Assert that ranks with the same part of a tensor have bitwise equal values.

    Raises:
        AssertionError: If a shard's values, or the outputs for the same batch, differ between two ranks; names the
            tensors and the ranks.

    Collective: none; called in the test's process.
    """
    first_seen: dict[Place, tuple[int, int]] = {}
    drifted: dict[str, tuple[int, int]] = {}
    for rank, view in enumerate(views):
        for place, digest in view.shards.items():
            holder, theirs = first_seen.setdefault(place, (rank, digest))
            if digest != theirs:
                drifted.setdefault(place[0], (holder, rank))
    if drifted:
        listed = ", ".join(f"{name} (ranks {one} and {other})" for name, (one, other) in sorted(drifted.items()))
        msg = f"Replicas of {len(drifted)} tensors differ between ranks: {listed}"
        raise AssertionError(msg)
    for rank, view in enumerate(views[1:], start=1):
        if not torch.equal(view.outputs, views[0].outputs):
            msg = (
                f"Ranks 0 and {rank} compute different outputs from the same batch: the parameters or buffers that "
                "their forward reads differ."
            )
            raise AssertionError(msg)
