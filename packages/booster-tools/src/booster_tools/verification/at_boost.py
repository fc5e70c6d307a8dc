"""`verify_boost`: the verification that ``Booster(verify=True)`` runs before it boosts, on copies that don't stay.

A first batch is taken from a copy of the data loader, and the random states are put back, so that a training that was
verified equals one that was not, bit for bit.
"""

from __future__ import annotations

import copy
import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_core.precision import NARROW
from booster_core.ranks import this_host
from booster_runtime.lazy import is_lazy
from booster_tools.verification.first_batches import copy_of, first_batches
from booster_tools.verification.losses import losses_of_script
from booster_tools.verification.report import Verification
from booster_tools.verification.run import compare_with, random_state_kept, reference_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from booster_core import Booster
    from booster_core.plugin import Boosted

_STEPS = 2
"""The second step is the first that depends on optimizer state and on parameters that were shared out."""
_MODEL_SIZES = 12
"""Memory of a verification on one rank, in sizes of the model: a copy with gradients, optimizer state, initial and
final values and each step's gradients, and then a boosted copy."""
_MORE_IN_LOW_PRECISION = 4
"""Values and gradients of the same training in fp32."""
_INSTEAD = "Leave `verify` out, and call `booster_tools.verify` with a small configuration of the model"


def verify_boost(booster: Booster, objects: Boosted, loss: Callable[[nn.Module, Any], Tensor] | None) -> None:
    """Train copies for two steps under the plugin and in one process, and say how long it took.

    Args:
        booster: With the plugin under test; boosts a copy.
        objects: What the user passed to `boost`; nothing of it changes.
        loss: Returns the loss of a model and a batch; ``None`` where it is found out.

    Raises:
        ConfigError: If there is no first batch, the loss is not known, or the copies can't be made or don't fit.
        GradientError: If the plugin does not train the model as one process does.

    Collective: every rank of the world.
    """
    started = time.perf_counter()
    coordinator = booster.context.coordinator
    model, optimizer = objects.model, objects.optimizer
    if optimizer is None or objects.dataloader is None:
        missing = "optimizer" if optimizer is None else "data loader"
        msg = (
            f"`verify` trains on the data loader's first batch, and `boost` got no {missing}. Pass it, or boost this "
            f"model by a Booster without `verify`. {_INSTEAD} to verify it."
        )
        raise ConfigError(msg)
    machine = this_host().machine
    num_local = coordinator.all_gather_object(machine, name="boost").count(machine)
    with random_state_kept():
        with coordinator.together("boost"):
            policy = booster.precision.for_model(model)
            num_sizes = _MODEL_SIZES + (_MORE_IN_LOW_PRECISION if policy.compute_dtype in NARROW else 0)
            if policy is not booster.precision:  # copies of a model in bf16 are trained in fp32
                num_sizes *= 2
            _check_size(model, num_sizes, num_local)
        shares = first_batches(objects.dataloader, booster.plugin, coordinator)
        with coordinator.together("boost"):
            losses = losses_of_script(booster.plugin, objects.criterion, loss, shares[0])
            reference = reference_for(booster, lambda: copied(model, optimizer), losses, shares, _STEPS)
        loader = copy_of(objects.dataloader)
        differences = compare_with(reference, booster, *copied(model, optimizer), losses, shares, dataloader=loader)
    gc.collect()  # strategies keep their model in cycles of hooks
    report = Verification(
        plugin=booster.plugin.name,
        world_size=coordinator.world_size,
        differences=differences,
        seconds=time.perf_counter() - started,
    )
    report.check()
    coordinator.print_on_master(report)


def copied(
    model: nn.Module,
    optimizer: Optimizer,
    memo: dict[int, Any] | None = None,
    *,
    what: str = "`verify`",
    instead: str = _INSTEAD,
) -> tuple[nn.Module, Optimizer]:
    """Return copies of a model and of its optimizer, which steps on the copy's parameters.

    Args:
        model: The user's model.
        optimizer: Over its parameters.
        memo: Copies that there are already, by ``id``, as for `copy.deepcopy`.
        what: Who trains copies, for messages.
        instead: What to do where that fails.

    Raises:
        ConfigError: If they can't be copied.

    Collective: none.
    """
    memo = {} if memo is None else memo
    try:
        copied, twin = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
        # Torch's own copy of an optimizer leaves out what a class of the user's keeps besides groups and state.
        # Schedulers put a `step` into its place that steps the original.
        for name in vars(optimizer).keys() - vars(twin).keys() - {"step"}:
            setattr(twin, name, copy.deepcopy(vars(optimizer)[name], memo))
    except Exception as error:
        msg = f"{what} trains copies, and `copy.deepcopy` failed with {type(error).__name__}: {error}. {instead}."
        raise ConfigError(msg) from error
    return copied, twin


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
            "`verify` trains whole copies of the model on each rank, and this model is lazy: it has no values yet. "
            f"Build it without `LazyInitContext` if it fits into memory. {_INSTEAD}."
        )
        raise ConfigError(msg)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    size_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    available = available_bytes()
    needed = num_sizes * size_bytes * num_ranks
    if available is not None and needed > available:
        msg = (
            f"`verify` needs about {needed / 2**30:.1f} GiB on this host: {num_sizes} times the model's "
            f"{size_bytes / 2**30:.2f} GiB on each of {num_ranks} rank(s); {available / 2**30:.1f} GiB are available. "
            f"{_INSTEAD}."
        )
        raise ConfigError(msg)


def available_bytes() -> int | None:
    """Return the host's memory that is available; ``None`` where the kernel does not tell.

    Collective: none.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
