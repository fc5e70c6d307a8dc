"""`join`: iterate over batches of which ranks have different numbers, until the last rank has run out.

Ranks that have run out take part in every step with their last batch and a weight of 0, so that the strategies'
collectives meet. The idea is that of ``torch.distributed.algorithms.Join``, which shadows the collectives of DDP; here
steps are whole, so that it works under every plugin, and the mean is over the ranks that still have batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from booster_core import Booster

_END = object()


def join(booster: Booster, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches until all ranks have run out, where some have fewer batches of their own than others.

    Loaders that `boost` or `prepare_dataloader` returned have equally many batches on every rank and don't need it.
    A rank that has run out gets its last batch again. `Booster.backward` and `execute_pipeline` count that as nothing:
    a step follows the mean loss of the ranks that still have batches. Each batch costs a collective call.

    Args:
        booster: Of the run.
        batches: This rank's batches.

    Raises:
        ConfigError: While iterating, if a rank has no batch at all and others do. Steps at the end raise after a
            backward that was not `Booster.backward`.

    Collective: every rank of the world, at each batch.
    """
    _, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    world_size = booster.context.coordinator.world_size
    source: Iterator[Any] | None = None
    batch: Any = _END
    while True:
        error: Exception | None = None
        is_own = False
        try:
            source = iter(batches) if source is None else source
            following = next(source, _END)
            if following is not _END:
                batch, is_own = following, True
        except Exception as caught:  # noqa: BLE001 - carried to every rank by `_count`
            error = caught
        num_own = _count(booster, is_own=is_own, is_empty=batch is _END, error=error)
        if not num_own:
            return
        num_active = num_own * size // world_size  # replicas have equally many ranks
        with booster.weighing_losses(size / num_active if is_own else 0.0):
            yield batch


def _count(booster: Booster, *, is_own: bool, is_empty: bool, error: Exception | None) -> int:
    """Return how many ranks have a batch of their own; raise on all of them what one raised, or lacks.

    Collective: every rank of the world.
    """
    coordinator = booster.context.coordinator
    flags = torch.tensor([is_own, error is not None, is_empty and error is None], device=booster.device).long()
    if coordinator.world_size > 1:
        collectives.all_reduce(flags, dist.ReduceOp.SUM).wait()
    num_own, num_failed, num_empty = flags.tolist()
    if num_own and is_empty and error is None:
        error = ConfigError(
            "This rank has no batch at all, so that it can't take part in the others' steps. `join` needs at least one "
            "batch on every rank."
        )
    if num_failed or (num_own and num_empty):
        with coordinator.together("join"):
            if error is not None:
                raise error
    return int(num_own)
