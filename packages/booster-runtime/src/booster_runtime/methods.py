"""The functions that do the work of methods of `Booster`, imported at their first use."""

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from peft import PeftModel
    from torch.utils.data import DataLoader

    from booster_core import Booster
    from booster_runtime.data.uneven import UnevenBatches

METHODS = {
    "accumulate": "accumulation:accumulate",
    "auto_plugin": "planning.automatic:auto_plugin",
    "check_replicas": "replicas:ReplicaCheck",
    "choose_plugin": "planning.automatic:choose_plugin",
    "enable_lora": "methods:enable_lora",
    "evaluate_batch": "whole_batches:evaluate_batch",
    "gather_for_metrics": "methods:gather_for_metrics",
    "join": "methods:join",
    "place_batches": "methods:place_batches",
    "profile": "profiling:profile",
    "reduce": "methods:reduce",
    "to_device": "methods:to_device",
    "train_batch": "whole_batches:train_batch",
    "verify_boost": "verification.at_boost:verify_boost",
}
"""Module and name of each, by the method's name."""


@functools.cache
def method(name: str) -> Callable[..., Any]:
    """Return the function of a method; it takes the Booster and the method's arguments by name.

    Collective: none.
    """
    module, function = METHODS[name].split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"booster_runtime.{module}"), function)
    return found


def join(booster: Booster, batches: Iterable[Any]) -> UnevenBatches:
    """Let ranks with uneven numbers of batches end together; see `Booster.join`."""
    from booster_runtime.data.uneven import UnevenBatches

    coordinator = booster.context.coordinator
    _, size = booster.plugin.data_parallel_coordinates(coordinator)
    return UnevenBatches(batches, size=size, coordinator=coordinator, device=booster.device)


def gather_for_metrics(booster: Booster, values: Any, loader: DataLoader[Any]) -> Any:
    """Gather values of all ranks' batches, each sample once; see `Booster.gather_for_metrics`."""
    from booster_runtime.data.metrics import gather_samples

    coordinator = booster.context.coordinator
    index, _ = booster.plugin.data_parallel_coordinates(coordinator)
    return gather_samples(values, loader, index=index, coordinator=coordinator, device=booster.device)


def reduce(booster: Booster, values: Any, reduction: str) -> Any:
    """Reduce values over the ranks that see different samples; see `Booster.reduce`."""
    from booster_runtime.data.metrics import reduce_values

    coordinator = booster.context.coordinator
    index, _ = booster.plugin.data_parallel_coordinates(coordinator)
    return reduce_values(values, reduction, index=index, coordinator=coordinator, device=booster.device)


def place_batches(booster: Booster, loader: Any) -> Any:
    """Let loaders that deal samples hand out batches on the run's device, if the Booster is to, and return them."""
    from booster_runtime.data.loader import DistributedDataLoader

    for each in loader if isinstance(loader, (list, tuple)) else [loader]:
        if isinstance(each, DistributedDataLoader) and booster.device_placement:
            each.place = booster.to_device
    return loader


def enable_lora(
    booster: Booster,
    pretrained_dir: str | Path | None,
    bnb_quantization_config: Any,
    *,
    quantize: bool,
    **arguments: Any,
) -> PeftModel:
    """Put low-rank adapters into a model; see `Booster.enable_lora`."""
    from booster_runtime import lora

    # A folder may be there for some ranks only.
    together = booster.context.coordinator.together("enable_lora") if pretrained_dir is not None else nullcontext()
    with together:
        quantization = None
        if quantize or bnb_quantization_config is not None:
            from booster_runtime.quantization import check_quantization

            quantization = check_quantization(bnb_quantization_config, booster.device)
        return lora.add_adapters(
            plugin=booster.plugin, pretrained_dir=pretrained_dir, quantization=quantization, **arguments
        )


def to_device(booster: Booster, batch: Any) -> Any:
    """Move a batch to the run's device; see `Booster.to_device`."""
    from booster_runtime.data.batches import to_device as move

    return move(batch, booster.device)
