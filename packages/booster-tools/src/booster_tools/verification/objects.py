"""`verify_objects`: a verification on copies of what a script is about to boost.

A first batch is taken from a copy of the data loader, and the random states are put back, so that a training that was
verified equals one that was not, bit for bit.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_core.plugin import Boosted
from booster_core.precision import NARROW
from booster_core.ranks import this_host
from booster_runtime.data import DistributedDataLoader, split_and_agree
from booster_runtime.lazy import is_lazy
from booster_tools.rehearsal import (
    check_trains_alone,
    checked_objects,
    copied,
    copied_loader,
    first_of,
    random_state_kept,
    without_step_hooks,
)
from booster_tools.verification.losses import losses_of_script
from booster_tools.verification.report import Verification
from booster_tools.verification.run import compare_with_one_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from booster_core import Booster
    from booster_core.plugin import Plugin
    from booster_core.ranks import DistCoordinator

_STEPS = 2
"""The second step is the first that depends on optimizer state and on parameters that were sharded."""
_MODEL_SIZES = 12
"""Memory of a verification on one rank, in sizes of the model: a copy with gradients, optimizer state, initial and
final values and each step's gradients, and then a boosted copy."""
_MORE_IN_LOW_PRECISION = 4
"""Values and gradients of the same training in fp32."""
_WHAT = "`verify_objects`"
_INSTEAD = "Call `booster_tools.verify` with a small configuration of the model instead"
_INSTEAD_OF_LOADER = "Call `booster_tools.verify` with a batch instead."


def verify_objects(
    booster: Booster,
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., Any] | None = None,
    dataloader: DataLoader[Any] | Sequence[DataLoader[Any]] | None = None,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Verification:
    """Train copies of a script's objects under the Booster's plugin and in one process, and compare them by name.

    Call it before `booster.boost` with the same objects. Copies take two steps on the data loader's first batch.
    Nothing of the objects changes, nor the random state, so the training that follows is the same bit for bit. Hooks
    observe that the copies are boosted, but none of their steps. Each rank holds whole copies: about 12 times the
    model's size, 16 times in bf16 and fp16.

    Args:
        booster: Its plugin, precision and device are used; it boosts nothing.
        model: As for `Booster.boost`, as are the others.
        optimizer: Over parameters of the model.
        criterion: Computes the loss as ``criterion(model(inputs), targets)`` where batches are pairs, else as
            ``criterion(outputs, batch)``, which is also how a pipeline calls it; ``None`` takes the loss that the
            model's outputs have.
        dataloader: Its first batch is read in this process, from a copy of the loader. Of several loaders the first
            is taken.
        loss: Returns the loss of a model and a batch, for scripts that compute it in another way.

    Returns:
        Every comparison, and how long it took.

    Raises:
        TypeError: If an argument is of another type.
        ConfigError: If `boost` would refuse the objects, the optimizer or the loader is missing or has no batch, the
            loss can't be computed, the model is lazy, the plugin waits for other launches, or copies can't be made or
            may not fit into memory.
        GradientError: If the plugin does not train the model as one process does.

    Collective: every rank of the world.
    """
    started = time.perf_counter()
    coordinator = booster.context.coordinator
    machine = this_host().machine
    num_local = coordinator.all_gather_object(machine, name="verify_objects").count(machine)
    with random_state_kept(booster.device):
        with coordinator.together("verify_objects"):
            check_trains_alone(booster.plugin)
            if loss is not None and not callable(loss):
                msg = f"`loss` of `verify_objects` is a function `loss(model, batch)`; got `{type(loss).__name__}`."
                raise TypeError(msg)
            checked = checked_objects(Boosted(model, optimizer, criterion), dataloader, what=_WHAT)
            policy = booster.precision.for_model(model)
            num_sizes = _MODEL_SIZES + (_MORE_IN_LOW_PRECISION if policy.compute_dtype in NARROW else 0)
            if policy is not booster.precision:  # copies of a model in bf16 are trained in fp32
                num_sizes *= 2
            _check_size(model, num_sizes, num_local)
        loader: DataLoader[Any] = checked.dataloader
        shares = _first_batches(loader, booster.plugin, coordinator)
        with coordinator.together("verify_objects"):
            losses = losses_of_script(booster.plugin, criterion, loss, shares[0])
            loader = copied_loader(loader, what=_WHAT, instead=_INSTEAD_OF_LOADER)
        differences = compare_with_one_process(
            without_step_hooks(booster, booster.plugin),
            lambda: copied(model, optimizer, what=_WHAT, instead=_INSTEAD),
            losses,
            shares,
            _STEPS,
            what="verify_objects",
            dataloader=loader,
        )
    gc.collect()  # strategies keep their model in cycles of hooks
    report = Verification(
        plugin=booster.plugin.name,
        world_size=coordinator.world_size,
        differences=differences,
        seconds=time.perf_counter() - started,
    )
    report.check()
    return report


def _check_size(model: nn.Module, num_sizes: int, num_ranks: int) -> None:
    """Refuse a model whose copies may not fit into this host's memory.

    Args:
        model: The user's model.
        num_sizes: How many times its size a rank needs.
        num_ranks: Number of ranks on this host.

    Raises:
        ConfigError: If the model has no values yet, or is too large.
    """
    if is_lazy(model):
        msg = (
            "`verify_objects` trains whole copies of the model on each rank, and this model is lazy: it has no values "
            f"yet. Build it without `LazyInitContext` if it fits into memory. {_INSTEAD}."
        )
        raise ConfigError(msg)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    size_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    available = available_bytes()
    needed = num_sizes * size_bytes * num_ranks
    if available is not None and needed > available:
        msg = (
            f"`verify_objects` needs about {needed / 2**30:.1f} GiB on this host: {num_sizes} times the model's "
            f"{size_bytes / 2**30:.2f} GiB on each of {num_ranks} rank(s); {available / 2**30:.1f} GiB are available. "
            f"{_INSTEAD}."
        )
        raise ConfigError(msg)


def available_bytes() -> int | None:
    """Return the host's memory that is available; ``None`` where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _first_batches(loader: DataLoader[Any], plugin: Plugin, coordinator: DistCoordinator) -> list[Any]:
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
        copied = copied_loader(loader, what=_WHAT, instead=_INSTEAD_OF_LOADER)
    split = split_and_agree(copied, plugin, coordinator)
    index, size = plugin.data_parallel_coordinates(coordinator)
    with coordinator.together("verify_objects"):
        if isinstance(split, DistributedDataLoader):
            split.on_batch = None
        batch = first_of(split, what=_WHAT)
    batches = dict(reversed(coordinator.all_gather_object((index, batch), name="verify_objects")))
    return [batches[each] for each in range(size)]
