"""`choose_plugin`: the installed plugin whose training steps are fastest among those that fit into a budget.

Rank 0 plans a step under each setting, while the others wait, and tells them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.precision import PrecisionPolicy
from booster_core.ranks import ensure_process_group
from booster_tools.functions import TrainingFunctions
from booster_tools.planning.candidates import Candidate, candidates
from booster_tools.planning.ranking import Devices, Planned, planned, size_text
from booster_tools.planning.simulate import StepCost, TrainingStep, shares_of, simulate
from booster_tools.verification.losses import has_stages

if TYPE_CHECKING:
    import torch

    from booster_core.plugin import Plugin
    from booster_core.ranks import DistCoordinator

_ALIKE = 1.01
"""Of settings whose estimated times differ by less, the one that needs least memory is taken."""


def choose_plugin(
    functions: TrainingFunctions,
    *,
    memory_budget_bytes: int,
    mixed_precision: PrecisionPolicy | str | None = None,
    device: torch.device | str | None = None,
) -> Plugin:
    """Return the fastest installed plugin whose training steps fit into a budget, the same on every rank.

    Call it before ``Booster(device, mixed_precision, plugin)``, which takes what it returns. Rank 0 plans a step under
    each setting, as `plan` does, and prints what it chose; the random state stays. Settings with a pipeline or with
    offloading are left out: their training loop or their speed is another. A group of one is started where nothing was
    launched.

    Args:
        functions: Make model, optimizer and the whole batch, and compute the loss.
        memory_budget_bytes: What a rank may hold at the peak of a step, in bytes; the same on every rank.
        mixed_precision: As for `Booster`.
        device: As for `Booster`.

    Raises:
        TypeError: If ``functions`` are none.
        ConfigError: If the budget is no positive number of bytes or differs between ranks, a training step can't be
            planned, none fits, or a launcher started several processes and the run is not launched.

    Collective: every rank of the world.
    """
    coordinator = ensure_process_group()
    found: Planned | None = None
    with coordinator.together("choose_plugin"):
        if not isinstance(functions, TrainingFunctions):
            msg = (
                f"`choose_plugin` takes `TrainingFunctions(build, batch, loss)`; got `{type(functions).__name__}`. "
                "`build` returns model and optimizer, `batch` the samples of all ranks."
            )
            raise TypeError(msg)
        _check_budget(memory_budget_bytes)
        policy = None if mixed_precision is None else PrecisionPolicy.parse(mixed_precision)
        on_host = Booster(device).device.type == "cpu"
    coordinator.agree("choose_plugin", {"memory_budget_bytes": memory_budget_bytes})
    with coordinator.together("choose_plugin"):
        if coordinator.rank == 0:
            devices = Devices(number=coordinator.world_size, memory_bytes=memory_budget_bytes)
            training = TrainingStep(
                build=functions.build,
                share=shares_of(functions.batch),
                criterion=functions.loss,
                mixed_precision=policy,
                on_host=on_host,
            )
            found = _best(training, devices)
    return _made_on_all(found, coordinator)


def _check_budget(budget: Any) -> None:
    """Raise where a budget is no number of bytes.

    Raises:
        ConfigError: Naming it.
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        msg = (
            f"`memory_budget_bytes={budget!r}` is no positive number of bytes. Pass what a rank may hold at the "
            "peak of a training step, such as `memory_budget_bytes=60 * 2**30`."
        )
        raise ConfigError(msg)


def _made_on_all(found: Planned | None, coordinator: DistCoordinator) -> Plugin:
    """Make the plugin that rank 0 found on every rank, and print it on rank 0.

    Raises:
        PluginError: If a rank can't load it.
        ConfigError: If it refuses its options.

    Collective: every rank of the world.
    """
    chosen = None if found is None else (found.candidate.name, dict(found.candidate.options))
    name, options = coordinator.broadcast_object(chosen, name="choose_plugin")
    with coordinator.together("choose_plugin"):
        plugin = Candidate(name=name, options=options).make()
    if found is not None and found.prediction is not None:
        peak, budget = found.prediction.peak_bytes, found.devices.memory_bytes
        coordinator.print_on_master(
            f"choose_plugin chose {found.candidate}: {size_text(peak)} of {size_text(budget)} at the peak of a step."
        )
    return plugin


def _best(training: TrainingStep, devices: Devices) -> Planned:
    """Return the fastest setting that fits.

    Raises:
        ConfigError: If a training step can't be planned, or none fits.
    """
    simulated = partial(_without_stages, training, devices.number)
    found = [planned(each, devices, simulated) for each in candidates(devices.number)]
    fitting = [(each.prediction.peak_bytes, each) for each in found if each.prediction is not None and each.fits]
    if not fitting:
        raise _nothing_fits(found, devices.memory_bytes)
    fastest = min(each.step_seconds for _, each in fitting)
    alike = [(peak, each) for peak, each in fitting if each.step_seconds <= _ALIKE * fastest]
    return min(alike, key=lambda each: each[0])[1]


def _without_stages(training: TrainingStep, world_size: int, plugin: Plugin) -> StepCost:
    if has_stages(plugin):
        msg = "Loops over a pipeline differ from others, so that it has to be named."
        raise ConfigError(msg)
    return simulate(training, plugin, world_size)


def _nothing_fits(found: list[Planned], budget: int) -> ConfigError:
    sizes = [(each.prediction.peak_bytes, each) for each in found if each.prediction is not None]
    if not sizes:
        reasons = dict.fromkeys(str(each.problem) for each in found)
        listed = " ".join(f"({index + 1}) {reason}" for index, reason in enumerate(reasons))
        return ConfigError(
            "`choose_plugin` could plan no training step of this model under any installed plugin: "
            f"{listed or 'none is installed.'} Name a plugin instead."
        )
    peak, nearest = min(sizes, key=lambda each: each[0])
    return ConfigError(
        f"No installed plugin trains this model within `memory_budget_bytes={budget}` ({size_text(budget)}). "
        f"Nearest is {nearest.candidate}, with {size_text(peak)} at the peak of a step. Use more ranks, smaller "
        "batches, activation checkpointing, or a plugin that offloads or has a pipeline, which has to be named."
    )
