"""The first batch that each data parallel rank will train on, taken from a copy of the user's data loader."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from booster_core.errors import ConfigError
from booster_runtime.data import DistributedDataLoader, split_and_agree

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from booster_core.plugin import Plugin
    from booster_core.ranks import DistCoordinator

_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def first_batches(loader: DataLoader[Any], plugin: Plugin, coordinator: DistCoordinator) -> list[Any]:
    """Return the first batch of each data parallel rank, without moving the loader on.

    Samples are loaded in this process, whatever the loader's number of workers.

    Args:
        loader: The user's data loader.
        plugin: Tells which ranks see different samples.
        coordinator: Of the run.

    Raises:
        ConfigError: If the loader can't be copied or split, or has no batch.

    Collective: every rank of the world.
    """
    with coordinator.together("verify_objects"):
        copied = copy_of(loader)
    split = split_and_agree(copied, plugin, coordinator)
    index, size = plugin.data_parallel_coordinates(coordinator)
    with coordinator.together("verify_objects"):
        if isinstance(split, DistributedDataLoader):
            split.on_batch = None
        try:
            batch = next(iter(split))
        except StopIteration:
            msg = "`verify_objects` trains on the data loader's first batch, and the loader has none."
            raise ConfigError(msg) from None
    batches = dict(reversed(coordinator.all_gather_object((index, batch), name="verify_objects")))
    return [batches[each] for each in range(size)]


def copy_of(
    loader: DataLoader[Any],
    *,
    what: str = "`verify_objects`",
    instead: str = "Call `booster_tools.verify` with a batch instead.",
) -> DataLoader[Any]:
    """Return a copy of a loader that has no workers.

    The samples of a map-style data set are shared, and its generators are copied; a stream is copied, because what
    was read of it would be lost.

    Args:
        loader: The user's data loader.
        what: Who takes a batch, for messages.
        instead: What to do where that fails.

    Raises:
        ConfigError: If it can't be copied.
    """
    memo: dict[int, Any] = {}
    if getattr(loader, "_iterator", None) is not None:
        memo[id(loader._iterator)] = None  # noqa: SLF001 - persistent workers are not copied
    try:
        if not isinstance(loader.dataset, IterableDataset):
            memo[id(loader.dataset)] = _with_own_generators(loader.dataset)
        copied = copy.deepcopy(loader, memo)
    except Exception as error:
        msg = (
            f"{what} takes the first batch from a copy of the data loader, and `copy.deepcopy` failed with "
            f"{type(error).__name__}: {error}. {instead}"
        )
        raise ConfigError(msg) from error
    # Torch refuses to change some of these on a loader, and others where there are no workers.
    vars(copied).update(
        num_workers=0,
        prefetch_factor=None,
        persistent_workers=False,
        pin_memory=False,
        timeout=0,
        _DataLoader__multiprocessing_context=None,
    )
    return copied


def _with_own_generators(dataset: Any) -> Any:
    """Return a shallow copy of a data set with generators of its own; what can't be copied has none."""
    if not hasattr(dataset, "__dict__"):
        return dataset
    twin = copy.copy(dataset)
    for name, value in vars(twin).items():
        if isinstance(value, _RANDOM):
            vars(twin)[name] = copy.deepcopy(value)
    return twin
