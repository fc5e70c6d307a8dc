"""Gathering what ranks computed from their batches, each sample once, for metrics over a whole data set.

The idea of leaving out repeated samples where results are gathered is Accelerate's (``gather_for_metrics``); here the
loader is named, so that several can be in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_runtime.data.loader import DistributedDataLoader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from booster_core.ranks import DistCoordinator


def gather_samples(
    values: Any, loader: DataLoader[Any], *, index: int, coordinator: DistCoordinator, device: torch.device
) -> Any:
    """Return values of the samples of all ranks' last batches, each once, in the order of the data set's epoch.

    Args:
        values: As for `DistributedDataLoader.without_padding`; ``None`` on ranks that have none.
        loader: The loader that handed out the batches.
        index: Index of this rank among the ranks that see different samples.
        coordinator: Carries the values.
        device: Where to put them.

    Raises:
        TypeError: If the loader splits no samples, or a value is no tensor.
        ConfigError: If a tensor has not one value per sample, or ranks' values don't fit together.

    Collective: every rank of the world.
    """
    error: Exception | None = None
    own: Any = None
    by_rank = False
    try:
        if not isinstance(loader, DistributedDataLoader):
            msg = (
                "`dataloader` is the loader that `boost` or `prepare_dataloader` returned, which knows which samples "
                f"are repeated; got `{type(loader).__name__}`."
            )
            raise TypeError(msg)
        by_rank = loader.deals_batches
        if values is not None:
            own = pytree.tree_map(lambda tensor: tensor.detach().cpu(), loader.without_padding(values))
    except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
        error = caught
    coordinator.raise_together(error, name="gather_for_metrics")
    given: dict[int, Any] = {}
    for where, theirs in coordinator.all_gather_object((index, own), name="gather_for_metrics"):
        if theirs is not None:
            given.setdefault(where, theirs)  # ranks that work on one batch together have the same
    parts = [given[where] for where in sorted(given)]
    flat = [pytree.tree_flatten(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        msg = f"Ranks have values of different structure: {', '.join(sorted({str(spec) for _, spec in flat}))}."
        raise ConfigError(msg)
    if not flat:
        return None
    merged = [
        _merge(list(tensors), by_rank=by_rank).to(device)
        for tensors in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(merged, flat[0][1])


def _merge(tensors: list[torch.Tensor], *, by_rank: bool) -> torch.Tensor:
    """Join ranks' values: sample by sample in turn, as they were dealt, or one rank's batch after the other."""
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        shapes = ", ".join(str((str(tensor.dtype), tuple(tensor.shape))) for tensor in tensors)
        msg = f"Ranks have values of different shapes or types: {shapes}. Pad them alike, or reduce them per sample."
        raise ConfigError(msg)
    joined = torch.cat(tensors)
    if by_rank:
        return joined
    places = [(turn, rank) for rank, tensor in enumerate(tensors) for turn in range(len(tensor))]
    return joined[torch.tensor(sorted(range(len(places)), key=places.__getitem__), dtype=torch.int64)]
