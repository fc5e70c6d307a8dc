"""What this distribution does in a run, through the hooks that core offers to every distribution."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from booster_core.plugin import ModelWrapper, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from peft import LoraConfig, PeftModel
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Dataset

    from booster_core import Booster, Evaluation
    from booster_core.plugin import BoostContext, Boosted, Plugin
    from booster_core.ranks import DistCoordinator, Monitor, World
    from booster_core.state import StateAdapter
    from booster_runtime.data.uneven import UnevenBatches
    from booster_runtime.replicas import ReplicaCheck


@hookimpl
def before_launch(backend: str) -> None:
    """Refuse environment variables of collectives that have a wrong value, and let NCCL record its collectives."""
    from booster_runtime.collectives.settings import checks_collectives, requested_transport
    from booster_runtime.liveness.flight_recorder import keep_flight_record

    requested_transport()
    checks_collectives()
    if "nccl" in backend:
        keep_flight_record(os.environ)


@hookimpl
def watch_ranks(
    world: World,
    hosts: Sequence[str] | None,
    address: str,
    error_file: str | None,
    is_wanted: bool,  # noqa: FBT001 - hooks' arguments are passed by name
) -> Monitor | None:
    """Connect this rank to the monitor, so that all ranks end when one fails."""
    from booster_runtime.liveness import NOT_WANTED, start_monitor

    monitor = start_monitor(world, hosts, address, may_end_process=True, error_file=error_file, is_wanted=is_wanted)
    if monitor is None and world.unwatched_because not in (None, NOT_WANTED):
        msg = (
            f"Rank {world.rank} could not connect to the monitor on rank 0 ({world.unwatched_because}): if a rank "
            f"dies, this one waits for it for {world.timeout_seconds:g} s. Check that the hosts accept each other's "
            "connections on any port, or set BOOSTER_MONITOR=0 to run without it."
        )
        warnings.warn(msg, RuntimeWarning, stacklevel=2)
    return monitor


@hookimpl
def check_objects(plugin: Plugin, objects: Boosted) -> None:
    """Refuse a lazy model that was boosted before, and adapters that the plugin or optimizer does not train."""
    from booster_runtime.lazy.boosting import check_not_boosted
    from booster_runtime.lora import prepare_adapters

    check_not_boosted(objects.model)
    prepare_adapters(objects.model, objects.optimizer, plugin)


@hookimpl
def prepare_objects(plugin: Plugin, objects: Boosted, context: BoostContext) -> None:
    """Give a lazy model its values, or let the plugin do so with the same seeds on every rank."""
    from booster_runtime.lazy.boosting import prepare_lazy

    prepare_lazy(plugin, objects, context)


@hookimpl
def deal_dataloader(loader: DataLoader[Any], plugin: Plugin, coordinator: DistCoordinator) -> DataLoader[Any]:
    """Deal the samples of a user's data loader to data parallel ranks."""
    from booster_runtime.data.dealing import deal_dataloader as deal

    return deal(loader, plugin, coordinator)


@hookimpl
def prepare_dataloader(
    dataset: Dataset[Any], rank: int, world_size: int, options: Mapping[str, Any]
) -> DataLoader[Any]:
    """Make a data loader over this rank's samples."""
    from booster_runtime.data.prepare import prepare_dataloader as prepare

    return prepare(dataset, rank=rank, world_size=world_size, **options)


@hookimpl
def join_batches(booster: Booster, batches: Iterable[Any]) -> UnevenBatches:
    """Let ranks with uneven numbers of batches end together."""
    from booster_runtime.data.uneven import UnevenBatches as Joined

    coordinator = booster.context.coordinator
    _, size = booster.plugin.data_parallel_coordinates(coordinator)
    return Joined(batches, size=size, coordinator=coordinator, device=booster.device)


@hookimpl
def gather_samples(
    values: Any, loader: DataLoader[Any], index: int, coordinator: DistCoordinator, device: torch.device
) -> Any:
    """Gather values of all ranks' batches, each sample once."""
    from booster_runtime.data.metrics import gather_samples as gather

    return gather(values, loader, index=index, coordinator=coordinator, device=device)


@hookimpl
def train_batch(
    booster: Booster,
    data_iter: Iterator[Any],
    model: nn.Module,
    criterion: Callable[[Any, Any], Tensor] | None,
    optimizer: Optimizer,
    accumulation: int,
    max_norm: float | None,
    weight: Callable[[Any], float | Tensor] | None,
) -> Tensor:
    """Take an optimizer step on the next batches."""
    from booster_runtime.whole_batches import train_batch as train

    return train(
        booster, data_iter, model, criterion, optimizer, accumulation=accumulation, max_norm=max_norm, weight=weight
    )


@hookimpl
def evaluate_batch(
    booster: Booster,
    data_iter: Iterator[Any],
    model: nn.Module,
    criterion: Callable[[Any, Any], Tensor] | None,
    weight: Callable[[Any], float | Tensor] | None,
) -> Evaluation:
    """Compute loss and outputs of the next batch."""
    from booster_runtime.whole_batches import evaluate_batch as evaluate

    return evaluate(booster, data_iter, model, criterion, weight=weight)


@hookimpl
def replicated_state(model: nn.Module, optimizer: Optimizer | None, coordinator: DistCoordinator) -> StateAdapter:
    """Show a model and optimizer that every rank holds whole."""
    from booster_runtime.state.replicated import ReplicatedStateAdapter

    return ReplicatedStateAdapter(model, optimizer, coordinator)


@hookimpl
def after_configure(booster: Booster, plugin: Plugin, boosted: Boosted, context: BoostContext) -> None:
    """Compare ranks' first batches, and let ``save_pretrained`` of the boosted model save by Booster."""
    from booster_runtime.data.first_batch import watch_first_batch
    from booster_runtime.save_pretrained import take_over

    assert isinstance(boosted.model, ModelWrapper), "checked by `boost`"
    index, size = plugin.data_parallel_coordinates(context.coordinator)
    watch_first_batch(boosted.model, index=index, size=size)
    take_over(boosted.model, booster)


@hookimpl
def verify_boost(booster: Booster, objects: Boosted, loss: Callable[[nn.Module, Any], Tensor] | None) -> None:
    """Compare the training of copies under the plugin with that of one process."""
    from booster_runtime.verification.at_boost import verify_boost as verify

    verify(booster, objects, loss)


@hookimpl
def check_replicas(booster: Booster, model: nn.Module, optimizer: Optimizer | None, every: int) -> ReplicaCheck:
    """Compare what ranks hold of the same values every so many steps."""
    from booster_runtime.replicas import ReplicaCheck as Check

    return Check(booster, model, optimizer, every)


@hookimpl
def describe_run(models: Sequence[nn.Module]) -> list[str]:
    """Say which operations of lazy models' construction could not be recorded."""
    from booster_runtime.lazy.boosting import describe_lazy

    return describe_lazy(models)


@hookimpl
def add_adapters(
    plugin: Plugin,
    model: nn.Module,
    device: torch.device,
    lora_config: LoraConfig | None,
    pretrained_dir: str | Path | None,
    bnb_quantization_config: Any,
    quantize: bool,  # noqa: FBT001 - hooks' arguments are passed by name
) -> PeftModel:
    """Put low-rank adapters into a model."""
    from booster_runtime import lora

    quantization = None
    if quantize or bnb_quantization_config is not None:
        from booster_runtime.quantization import check_quantization

        quantization = check_quantization(bnb_quantization_config, device)
    return lora.add_adapters(
        model, plugin, lora_config=lora_config, pretrained_dir=pretrained_dir, quantization=quantization
    )
