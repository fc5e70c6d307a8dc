"""`plan`: predictions of many settings, ranked by whether they fit and by their estimated step time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from booster_core.errors import BoosterError, ConfigError
from booster_tools.planning.candidates import Candidate, candidates
from booster_tools.planning.processes import in_processes
from booster_tools.planning.simulate import STEPS, PlanStoppedError, StepCost, TrainingStep, shares_of, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from booster_core.plugin import Plugin
    from booster_tools.functions import TrainingFunctions

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices to plan for.

    Args:
        number: How many; one rank each.
        memory_bytes: Memory of each.
        interconnect_bytes_per_second: What each can send in a second while all do.
        flops_per_second: Floating point operations of each in a second, as training attains them.

    Raises:
        ConfigError: If a figure is not positive.
    """

    number: int
    memory_bytes: int
    interconnect_bytes_per_second: float = 50e9
    flops_per_second: float = 150e12

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                msg = f"`{name}={value}` of the devices must be positive."
                raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What became of one setting.

    Args:
        candidate: The setting.
        devices: What it was planned for.
        prediction: What a rank holds and sends; ``None`` where it can't be planned.
        problem: Why it can't be planned.
        held_bytes: What a rank has held at least, where its plan stopped for the problem.
    """

    candidate: Candidate
    devices: Devices
    prediction: StepCost | None = None
    problem: str | None = None
    held_bytes: int = 0

    @property
    def is_too_large(self) -> bool:
        """Whether a device's memory is known to be too small, although the plan stopped."""
        return self.prediction is None and self.held_bytes > self.devices.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak of a step fits into a device's memory."""
        return self.prediction is not None and self.prediction.peak_bytes <= self.devices.memory_bytes

    @property
    def step_seconds(self) -> float:
        """Estimated time of a step: computation and communication one after the other, at the devices' figures.

        The ranks of a pipeline wait for each other for the part of it that the schedule tells.
        """
        if self.prediction is None:
            return float("inf")
        computing = self.prediction.flops / self.devices.flops_per_second
        sending = self.prediction.sent_bytes / self.devices.interconnect_bytes_per_second
        return (computing + sending) / (1 - self.prediction.idle_share)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings, the best one first.

    Args:
        settings: Those that fit by estimated step time, then those that don't by their peak, then those that can't be
            planned and may fit.
        mixed_precision: Of all of them.
    """

    settings: tuple[Planned, ...]
    mixed_precision: str | None = None

    @property
    def best(self) -> Planned | None:
        """The first setting that fits; ``None`` where none does."""
        return self.settings[0] if self.settings and self.settings[0].fits else None

    @property
    def code(self) -> str | None:
        """The lines of a script that make the chosen Booster; ``None`` where no setting fits."""
        return None if self.best is None else self.best.candidate.code(self.mixed_precision)

    def __str__(self) -> str:
        columns = ("fits", "peak", "params", "grads", "optim", "transient", "sent/step", "step")
        lines = [" ".join(f"{name:>9}" for name in columns) + "  setting"]
        notes = []
        refused: dict[str | None, list[str]] = {}  # many settings often have one problem
        for each in self.settings:
            found = each.prediction
            if each.is_too_large:
                cells = ["no", f"> {size_text(each.held_bytes)}", *("-" for _ in columns[2:])]
                lines.append(" ".join(f"{cell:>9}" for cell in cells) + f"  {each.candidate}")
            elif found is None:
                refused.setdefault(each.problem, []).append(str(each.candidate))
            else:
                sizes = (
                    found.peak_bytes,
                    found.parameter_bytes,
                    found.gradient_bytes,
                    found.optimizer_bytes,
                    found.activation_bytes,
                    found.sent_bytes,
                )
                cells = ["yes" if each.fits else "no", *map(size_text, sizes), f"{each.step_seconds:.3g} s"]
                lines.append(" ".join(f"{cell:>9}" for cell in cells) + f"  {each.candidate}")
                notes += [] if found.assumed is None else [f"assumed: {each.candidate}: {found.assumed}"]
        notes += [f"not planned: {', '.join(settings)}: {problem}" for problem, settings in refused.items()]
        return "\n".join([*lines, *notes])


def plan(
    functions: TrainingFunctions,
    devices: Devices,
    *,
    plugins: Iterable[str] | None = None,
    settings: Iterable[Candidate] | None = None,
    mixed_precision: str | None = None,
    steps: int = STEPS,
    progress: Callable[[str], None] | None = None,
    num_processes: int = 1,
) -> Plan:
    """Predict a training step under the installed plugins, and rank them.

    Args:
        functions: Make model, optimizer and the whole batch, once for each setting, and compute the loss.
        devices: What to plan for.
        plugins: Names of the plugins to compare; all that are installed by default.
        settings: What to compare instead.
        mixed_precision: As for `Booster`, by name.
        steps: Steps to take in each setting; the last one is counted.
        progress: Called with a line for each setting that is planned.
        num_processes: How many settings are planned at a time, each in a fork of this process; 1 plans in this one.

    Returns:
        All settings, the best one first. Those that a plugin refuses, or that can't be planned, say why.

    Raises:
        ConfigError: If there is nothing to compare, or a process that makes plans is ended.

    Collective: none. Process groups of this process are not used.
    """
    chosen = list(candidates(devices.number, plugins) if settings is None else settings)
    if not chosen:
        msg = "There is no setting to plan. Install a plugin, such as booster-zero, or name one that is installed."
        raise ConfigError(msg)

    training = TrainingStep(
        build=functions.build,
        share=shares_of(functions.batch),
        criterion=functions.loss,
        mixed_precision=mixed_precision,
        steps=steps,
    )

    def work(place: int) -> Planned:
        return planned(chosen[place], devices, partial(simulate, training, world_size=devices.number))

    done = map(work, range(len(chosen))) if num_processes == 1 else in_processes(work, len(chosen), num_processes)
    found = []
    for count, each in enumerate(done, start=1):
        if progress is not None:
            progress(f"{count}/{len(chosen)} {each.candidate}")
        found.append(each)
    # Equal ones stay in the order in which they are compared.
    found.sort(key=lambda each: chosen.index(each.candidate))
    return Plan(settings=tuple(sorted(found, key=_order)), mixed_precision=mixed_precision)


def planned(candidate: Candidate, devices: Devices, simulated: Callable[[Plugin], StepCost]) -> Planned:
    """Return what became of one setting; what its plugin or the planner refuses is told, not raised.

    Args:
        candidate: The setting.
        devices: What to plan for.
        simulated: Simulates a rank under the setting's plugin.
    """
    try:
        found = simulated(candidate.make())
    except PlanStoppedError as error:
        return Planned(candidate=candidate, devices=devices, problem=str(error), held_bytes=error.held_bytes)
    except (BoosterError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return Planned(candidate=candidate, devices=devices, problem=str(error) or type(error).__name__)
    return Planned(candidate=candidate, devices=devices, prediction=found)


def _order(each: Planned) -> tuple[int, float]:
    if each.is_too_large:
        return 1, float(each.held_bytes)
    if each.prediction is None:
        return 2, 0.0
    return (0, each.step_seconds) if each.fits else (1, float(each.prediction.peak_bytes))


def size_text(num_bytes: int) -> str:
    """Return a size for people."""
    return f"{num_bytes / _GIB:.3g} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / 2**20:.3g} MiB"
