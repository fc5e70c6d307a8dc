"""What a case is, what it is given, and what it returns."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


class CannotRun(Exception):  # noqa: N818 - not an error: a library or a device of some kind is not here
    """Raised by a case that can't run on this machine; the message says what it needs."""


class Incomplete(Exception):  # noqa: N818 - says what is missing
    """Raised by a case that measured only a part: it has failed, and its figures are kept.

    Args:
        reason: What failed.
        figures: What was measured.
    """

    def __init__(self, reason, figures):
        super().__init__(reason)
        self.figures = figures


@dataclass(frozen=True)
class Figure:
    """A measurement, and what it is compared with.

    Attributes:
        what: What was measured.
        ours: One value a round, in ``unit``.
        yardstick: What ours is divided by; empty for a plain measurement.
        theirs: The yardstick's values, measured in the same rounds.
        unit: ``"s"``, ``"B"``, ``"B/s"``, ``"tokens/s"``, or nothing.
        bar: The most that the median of the ratios (of the values, without a yardstick) may be.
        at_least: The bar is the least that it may be.
    """

    what: str
    ours: Sequence[float]
    yardstick: str = ""
    theirs: Sequence[float] = ()
    unit: str = "s"
    bar: float | None = None
    at_least: bool = False

    @property
    def ratios(self):
        """What the bar is about: ours divided by theirs, round by round."""
        if not self.theirs:
            return sorted(self.ours)
        return sorted(own / other for own, other in zip(self.ours, self.theirs, strict=True))

    @property
    def is_met(self):
        """Whether the bar is met; true where there is none."""
        if self.bar is None:
            return True
        median = statistics.median(self.ratios)
        return median >= self.bar if self.at_least else median <= self.bar

    def as_json(self):
        """Return what the report keeps: medians and quartiles, and the rounds."""
        ratios = self.ratios
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return {
            **asdict(self),
            "median": statistics.median(ratios),
            "low": low,
            "high": high,
            "is_met": self.is_met,
        }


@dataclass(frozen=True)
class Setting:
    """Where a case runs.

    Attributes:
        device: Device type, ``"cuda"`` or ``"simulated"``.
        backend: As for ``launch``; the process group is open already.
        rank: This process's rank.
        world_size: Number of ranks.
        folder: An empty folder that the ranks share; removed after the case.
        library: The simulated accelerator's library, for processes that a case starts; empty for CUDA.
    """

    device: str
    backend: str
    rank: int
    world_size: int
    folder: Path
    library: str = ""

    @property
    def is_real(self):
        """Whether times and sizes mean something."""
        return self.device == "cuda"

    @property
    def module(self):
        """``torch.cuda``, or the simulated accelerator's module."""
        return torch.get_device_module(self.device)


@dataclass(frozen=True)
class Case:
    """A function that every rank calls, with ``Setting`` and the options.

    Attributes:
        name: Unique.
        function: At a module's top level. Returns the figures that it measured, those of rank 0 are kept, or nothing.
            An exception on any rank is a failure, `CannotRun` aside; `Incomplete` keeps its figures.
        options: Its keyword arguments.
        ranks: Number of ranks.
        seconds: Time limit, start included.
        is_timed: Runs alone, so that others don't disturb its times.
        only_on: The device type that it needs; "" for any.
    """

    name: str
    function: Callable[..., Sequence[Figure] | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    seconds: float = 90.0
    is_timed: bool = False
    only_on: str = ""


MODULES = (
    *("waits", "communicators", "streams", "offload", "saves", "faults", "precision", "features"),
    *("memory", "commands", "two_ranks", "training"),
)
"""Where the cases are, in the order in which they run."""


def all_cases():
    """Return every case by name, in the order in which they run."""
    modules = [f"device_runs.{name}" for name in MODULES]
    if find_spec("device_speed") is not None:  # of benchmarks/
        modules.append("device_speed")
    found = {}
    for module in modules:
        for case in import_module(module).CASES:
            assert case.name not in found, case.name
            found[case.name] = case
    return found
