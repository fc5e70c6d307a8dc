"""What every benchmark reports: ratios of measurements that took turns, in one form, printed and kept.

``BOOSTER_BENCH_RESULTS`` names a file, ``<benchmark>.jsonl``, that each result is appended to as a line of JSON;
``_page.py`` reads it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = "BOOSTER_BENCH_RESULTS"
_SCALES = {"s": (1e3, "ms"), "B": (2**-20, "MiB"), "B/s": (1e-6, "MB/s"), "": (1.0, "")}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One comparison.

    ``median``, ``low`` and ``high`` are the median and the quartiles of ``ours / theirs`` over the rounds; ``ours`` and
    ``theirs`` are medians in ``unit``. ``bar`` is the most that the median may be, or the least if ``at_least``.
    """

    benchmark: str
    what: str
    yardstick: str
    median: float
    low: float
    high: float
    ours: float
    theirs: float
    unit: str
    rounds: int
    bar: float | None
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the bar is met; true where there is none."""
        return self.bar is None or (self.median >= self.bar if self.at_least else self.median <= self.bar)


def compare(
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    yardstick: str,
    bar: float | None,
    at_least: bool = False,
    unit: str = "s",
) -> bool:
    """Print and keep the ratio of measurements, round by round, and return whether the bar is met.

    Args:
        what: What was measured.
        ours: Our measurements, one a round.
        theirs: Those of the yardstick, in the same rounds.
        yardstick: What ours is divided by.
        bar: The most that the median ratio may be; ``None`` where there is no bar.
        at_least: The bar is the least that it may be.
        unit: ``"s"``, ``"B"``, ``"B/s"``, or nothing.
    """
    ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
    low, high = (ratios[0], ratios[0]) if len(ratios) == 1 else _quartiles(ratios)
    result = Result(
        benchmark=Path(os.environ.get(RESULTS, sys.argv[0])).stem,
        what=what,
        yardstick=yardstick,
        median=statistics.median(ratios),
        low=low,
        high=high,
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        unit=unit,
        rounds=len(ratios),
        bar=bar,
        at_least=at_least,
    )
    print(describe(result), flush=True)
    if RESULTS in os.environ:
        with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    return result.is_met


def describe(result: Result) -> str:
    """Return a result as a line of text."""
    bar = "no bar" if result.bar is None else f"bar {'>=' if result.at_least else '<='} {result.bar:g}"
    return (
        f"{result.what}, to {result.yardstick}: {result.median:.3f} (quartiles {result.low:.3f} to "
        f"{result.high:.3f}; {in_unit(result.ours, result.unit)} to {in_unit(result.theirs, result.unit)} over "
        f"{result.rounds} rounds; {bar}{'' if result.is_met else ', missed'})"
    )


def in_unit(value: float, unit: str) -> str:
    """Return a value as people write it."""
    factor, name = (1e6, "µs") if unit == "s" and value < 1e-3 else _SCALES[unit]
    return f"{value * factor:.4g} {name}".strip()


def _quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high
