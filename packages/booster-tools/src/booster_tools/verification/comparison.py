"""`verify`: the same training under a plugin and in one process, compared tensor by tensor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime.lazy import is_lazy, materialize
from booster_tools.verification.losses import Losses, loss_of_outputs
from booster_tools.verification.reference import share_of
from booster_tools.verification.report import Verification
from booster_tools.verification.run import compare_with, random_state_kept, reference_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim import Optimizer

    from booster_core.plugin import Plugin
    from booster_core.precision import PrecisionPolicy

_SEED = 20


def verify(
    build: Callable[[], tuple[Any, ...]],
    plugin: Plugin | str,
    batch: Any,
    steps: int = 2,
    *,
    mixed_precision: PrecisionPolicy | str | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Train under a plugin and in one process, and compare outputs, losses, gradients and updates by name.

    Each rank trains the whole model on the whole batch as the reference, so model, optimizer and batch must fit into
    one device's memory. Every dropout is off; evaluation comes before training. The random state is restored
    afterwards.

    Args:
        build: Returns ``(model, optimizer)`` or ``(model, optimizer, criterion)``, with the same weights each time it
            is called under the same seed. The criterion is called as ``criterion(outputs, batch)`` and returns a mean
            over samples; without one the model's own ``outputs.loss`` is taken.
        plugin: The plugin, or the name of an installed one.
        batch: The whole batch, the same on every rank, which data parallel ranks share evenly: a mapping becomes
            keyword arguments of the model, a list or tuple positional ones.
        steps: Number of training steps, all on this batch.
        mixed_precision: As for `Booster`.
        tolerance: Largest relative error of outputs, losses and gradients that counts as rounding; by the precision
            when ``None``. Updates of parameters may differ by ten times as much.

    Returns:
        Every comparison; ``verify(...).check()`` raises where one is beyond rounding.

    Raises:
        ConfigError: If ``build`` makes other weights each time, or the batch can't be shared evenly.

    Collective: every rank of the world.
    """
    started = time.perf_counter()
    booster = Booster(mixed_precision=mixed_precision, plugin=plugin)
    coordinator = booster.context.coordinator
    with random_state_kept(booster.device):
        _, size = booster.plugin.data_parallel_coordinates(coordinator)
        with coordinator.together("verify"):
            shares = [share_of(batch, one, size) for one in range(size)]
            criteria: list[Callable[[Any, Any], Tensor]] = []
            losses = Losses.by_criterion(lambda outputs, share: criteria[-1](outputs, share))  # noqa: PLW0108 - made later

            def make() -> tuple[nn.Module, Optimizer]:
                model, optimizer, criterion = _built(build)
                criteria.append(criterion)
                return materialize(model), optimizer

            reference = reference_for(booster, make, losses, shares, steps)
            model, optimizer, _ = _built(build)
            if not is_lazy(model):
                _check_same(model, reference.initial)
        differences = compare_with(reference, booster, model, optimizer, losses, shares, tolerance)
    return Verification(
        plugin=booster.plugin.name,
        world_size=coordinator.world_size,
        differences=differences,
        seconds=time.perf_counter() - started,
    )


def _built(build: Callable[[], tuple[Any, ...]]) -> tuple[nn.Module, Optimizer, Callable[[Any, Any], Tensor]]:
    torch.manual_seed(_SEED)
    made = build()
    kinds = (nn.Module, torch.optim.Optimizer)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(map(isinstance, made, kinds)):
        got = ", ".join(type(each).__name__ for each in made) if isinstance(made, tuple) else type(made).__name__
        msg = f"`build` returns (model, optimizer) or (model, optimizer, criterion); got `{got}`."
        raise ConfigError(msg)
    return made[0], made[1], made[2] if len(made) == 3 and made[2] is not None else loss_of_outputs


def _check_same(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name not in values or not torch.equal(parameter.detach().cpu().to(values[name].dtype), values[name]):
            msg = (
                f"`build` makes other weights each time: '{name}' differs between two calls under the same seed. Draw "
                "them from torch's generator, or load them from a file."
            )
            raise ConfigError(msg)
