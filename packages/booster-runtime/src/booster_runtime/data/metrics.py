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
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from booster_core import Booster


def gather_for_metrics(booster: Booster, values: Any, dataloader: DataLoader[Any]) -> Any:
    """Return values of every rank's last batch, each sample once, in the order of the data set.

    Ranks get equally many batches, so samples at an epoch's end are repeated on some of them; those are left out.
    Values are sent through the host: reduce them to what the metric needs, such as predictions instead of logits.

    Args:
        booster: Of the run.
        values: Tensors in any nest of dicts, lists and tuples, each with one value per sample of this rank's batch
            along its first dimension; ``None`` on a rank that has none, such as a pipeline's first stage.
        dataloader: The loader that the batch came from, as `boost` or `prepare_dataloader` returned it.

    Returns:
        The same nest of tensors on this run's device, the same on every rank.

    Raises:
        TypeError: If the loader is another one, or a value is no tensor.
        ConfigError: If a tensor has not one value per sample, or ranks' tensors don't fit together.

    Collective: every rank of the world, after each batch.
    """
    coordinator = booster.context.coordinator
    own: Any = None
    with coordinator.together("gather_for_metrics"):
        if not isinstance(dataloader, DistributedDataLoader):
            msg = (
                "`dataloader` is the loader that `boost` or `prepare_dataloader` returned, which knows which samples "
                f"are repeated; got `{type(dataloader).__name__}`."
            )
            raise TypeError(msg)
        by_rank = dataloader.splits_batches
        if values is not None:
            own = pytree.tree_map(lambda tensor: tensor.detach().cpu(), dataloader.without_padding(values))
    return _joined(own, lambda tensors: _merge(tensors, by_rank=by_rank), "gather_for_metrics", booster)


def reduce(booster: Booster, values: Any, reduction: str = "mean") -> Any:
    """Return the mean or sum of values over the ranks that see different samples, each of these counted once.

    Args:
        booster: Of the run.
        values: Tensors and numbers in any nest of dicts, lists and tuples; they are sent through the host. ``None`` on
            a rank that has none, such as a pipeline's first stage.
        reduction: ``"mean"`` or ``"sum"``.

    Returns:
        The same nest of tensors on this run's device, the same on every rank.

    Raises:
        TypeError: If a value is neither a tensor nor a number.
        ConfigError: If the reduction is another one, or ranks' values don't fit together.

    Collective: every rank of the world.
    """
    coordinator = booster.context.coordinator
    own: Any = None
    with coordinator.together("reduce"):
        if reduction not in ("mean", "sum"):
            msg = f"`reduction={reduction!r}` is neither 'mean' nor 'sum'."
            raise ConfigError(msg)
        if values is not None:
            own = pytree.tree_map(_as_tensor, values)

    def reduced(tensors: list[torch.Tensor]) -> torch.Tensor:
        _check_alike(tensors, lambda tensor: tensor.shape)
        stacked = torch.stack(tensors)
        if reduction == "sum":
            return stacked.sum(0)
        dtype = stacked.dtype if stacked.is_floating_point() or stacked.is_complex() else torch.get_default_dtype()
        return stacked.to(dtype).mean(0)

    return _joined(own, reduced, "reduce", booster)


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, (int, float, complex, torch.Tensor)):
        return torch.as_tensor(value).detach().cpu()
    msg = f"Values to reduce are tensors and numbers; got `{type(value).__name__}`."
    raise TypeError(msg)


def _joined(
    own: Any,
    join: Callable[[list[torch.Tensor]], torch.Tensor],
    name: str,
    booster: Booster,
) -> Any:
    """Return what becomes of the values of all ranks that see different samples, each once and in their order."""
    coordinator = booster.context.coordinator
    index, _ = booster.plugin.data_parallel_coordinates(coordinator)
    given: dict[int, Any] = {}
    for where, theirs in coordinator.all_gather_object((index, own), name=name):
        if theirs is not None:
            given.setdefault(where, theirs)  # ranks that work on one batch together have the same
    flat = [pytree.tree_flatten(given[where]) for where in sorted(given)]
    if any(spec != flat[0][1] for _, spec in flat):
        msg = f"Ranks have values of different structure: {', '.join(sorted({str(spec) for _, spec in flat}))}."
        raise ConfigError(msg)
    if not flat:
        return None
    tensors = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([join(list(each)).to(booster.device) for each in tensors], flat[0][1])


def _check_alike(tensors: list[torch.Tensor], shape: Callable[[torch.Tensor], torch.Size]) -> None:
    if len({(tensor.dtype, shape(tensor)) for tensor in tensors}) > 1:
        shapes = ", ".join(str((str(tensor.dtype), tuple(tensor.shape))) for tensor in tensors)
        msg = f"Ranks have values of different shapes or types: {shapes}. Pad them alike, or reduce them per sample."
        raise ConfigError(msg)


def _merge(tensors: list[torch.Tensor], *, by_rank: bool) -> torch.Tensor:
    """Join ranks' values: sample by sample in turn, as they were split, or one rank's batch after the other."""
    _check_alike(tensors, lambda tensor: tensor.shape[1:])
    joined = torch.cat(tensors)
    if by_rank:
        return joined
    places = [(turn, rank) for rank, tensor in enumerate(tensors) for turn in range(len(tensor))]
    return joined[torch.tensor(sorted(range(len(places)), key=places.__getitem__), dtype=torch.int64)]
