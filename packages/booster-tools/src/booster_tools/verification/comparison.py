"""`verify`: the same training under a plugin and in one process, compared tensor by tensor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from booster_core import Booster
from booster_tools.rehearsal import built, check_trains_alone, random_state_kept, share_of
from booster_tools.verification.losses import Losses, loss_of_outputs
from booster_tools.verification.report import Verification
from booster_tools.verification.run import compare_with_one_process

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from booster_core.plugin import Plugin
    from booster_core.precision import PrecisionPolicy
    from booster_tools.functions import TrainingFunctions

_SEED = 20


def verify(
    functions: TrainingFunctions,
    plugin: Plugin | str,
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
        functions: Make model, optimizer and the whole batch, the same on every rank, and compute the loss.
        plugin: The plugin, or the name of an installed one.
        steps: Number of training steps, all on this batch.
        mixed_precision: As for `Booster`.
        tolerance: Largest relative error of outputs, losses and gradients that counts as rounding; by the precision
            when ``None``. Updates of parameters may differ by ten times as much.

    Returns:
        Every comparison; ``verify(...).check()`` raises where one is beyond rounding.

    Raises:
        ConfigError: If ``build`` makes other weights each time, the batch can't be shared evenly, or the plugin waits
            for other launches.

    Collective: every rank of the world.
    """
    started = time.perf_counter()
    booster = Booster(mixed_precision=mixed_precision, plugin=plugin)
    coordinator = booster.context.coordinator

    def make() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(_SEED)
        return built(functions.build)

    with random_state_kept(booster.device):
        _, size = booster.plugin.data_parallel_coordinates(coordinator)
        with coordinator.together("verify"):
            check_trains_alone(booster.plugin)
            batch = functions.batch()
            shares = [share_of(batch, one, size) for one in range(size)]
        losses = Losses.by_criterion(functions.loss or loss_of_outputs)
        differences = compare_with_one_process(booster, make, losses, shares, steps, what="verify", tolerance=tolerance)
    return Verification(
        plugin=booster.plugin.name,
        world_size=coordinator.world_size,
        differences=differences,
        seconds=time.perf_counter() - started,
    )
