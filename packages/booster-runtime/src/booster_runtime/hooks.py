"""What this distribution does in a run, through the hooks that core offers to every distribution."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from booster_core.plugin import ModelWrapper, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from booster_core import Booster
    from booster_core.plugin import BoostContext, Boosted, Plugin
    from booster_core.ranks import DistCoordinator, Monitor, World


@hookimpl
def before_launch(backend: str) -> None:
    """Refuse environment variables with a wrong value, set up the log, and let NCCL record its collectives."""
    from booster_core.log import configure_log
    from booster_runtime.collectives.settings import checks_collectives
    from booster_runtime.liveness.flight_recorder import keep_flight_record

    configure_log()
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
    """Refuse a lazy model whose values are gone, and adapters that the plugin or optimizer does not train."""
    from booster_runtime.lazy.boosting import check_not_taken
    from booster_runtime.lora import check_adapters

    check_not_taken(objects.model)
    check_adapters(objects.model, objects.optimizer, plugin)


@hookimpl
def prepare_objects(plugin: Plugin, objects: Boosted, context: BoostContext) -> None:
    """Give a lazy model its values, or let the plugin do so, and take an adapter's frozen base out of the optimizer."""
    from booster_runtime.frozen import note_frozen
    from booster_runtime.lazy.boosting import prepare_lazy
    from booster_runtime.lora import drop_frozen

    prepare_lazy(plugin, objects, context)
    drop_frozen(objects.model, objects.optimizer)
    note_frozen(objects)  # without what the line above has taken out of the optimizer


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
def booster_method(name: str) -> Callable[..., Any] | None:
    """Do the work of methods of `Booster`."""
    if name == "enable_lora":
        from booster_runtime.lora import enable_lora

        return enable_lora
    if name == "place_batches":
        from booster_runtime.data.loader import place_batches

        return place_batches
    return None


@hookimpl
def after_configure(booster: Booster, plugin: Plugin, boosted: Boosted, context: BoostContext) -> None:
    """Place and compare batches, watch frozen parameters, and let ``save_pretrained`` save by Booster."""
    from booster_runtime.data.first_batch import watch_first_batch
    from booster_runtime.data.loader import place_batches
    from booster_runtime.frozen import watch_frozen
    from booster_runtime.save_pretrained import take_over

    assert isinstance(boosted.model, ModelWrapper), "checked by `boost`"
    index, size = plugin.data_parallel_coordinates(context.coordinator)
    watch_first_batch(boosted.model, index=index, size=size)
    watch_frozen(boosted)
    place_batches(booster, boosted.dataloader)
    take_over(boosted.model, booster)


@hookimpl
def describe_run(models: Sequence[nn.Module]) -> list[str]:
    """Say how gradients are summed, and which operations of lazy models' construction could not be recorded."""
    from booster_runtime.lazy.boosting import describe_lazy
    from booster_runtime.sharding.reductions import describe_reductions

    return [*describe_reductions(models), *describe_lazy(models)]
