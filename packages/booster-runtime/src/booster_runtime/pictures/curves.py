"""A curve over steps, such as a training loss."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_runtime.pictures.axes import ticks
from booster_runtime.pictures.svg import Drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 50, 50
_WIDTH, _HEIGHT = 720, 360
_RAW, _SMOOTH, _GRID = "#b8cce0", "#1f5a94", "#e4e4e4"


def draw_curve(values: Sequence[float], *, title: str, y_name: str, x_name: str = "step") -> str:
    """Return a curve of one value per step as SVG, with its running mean on top.

    The mean is over a twentieth of the steps. Values that are not finite leave gaps.

    Args:
        values: One value per step, the first at step 1.
        title: Printed above the curve.
        y_name: What the values are, with their unit.
        x_name: What is counted.

    Raises:
        ConfigError: If no value is finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        msg = f"None of the {len(values)} values of '{title}' is finite, so there is no curve to draw."
        raise ConfigError(msg)
    low, high = min(0.0, *finite), max(0.0, *finite)
    span = high - low or 1.0

    def x(index: float) -> float:
        return _LEFT + _WIDTH * index / max(len(values), 1)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - (value - low) / span)

    sheet = Drawing(_LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM)
    sheet.text(_LEFT, 28, title, size=15, color="#000000")
    for mark in {*ticks(high), *(-mark for mark in ticks(-low))}:
        sheet.line(_LEFT, y(mark), _LEFT + _WIDTH, y(mark), _GRID)
        sheet.text(_LEFT - 8, y(mark) + 4, f"{mark:g}", anchor="end")
    for mark in ticks(len(values)):
        sheet.line(x(mark), _TOP + _HEIGHT, x(mark), _TOP + _HEIGHT + 5, "#888888")
        sheet.text(x(mark), _TOP + _HEIGHT + 18, f"{mark:g}", anchor="middle")
    sheet.text(_LEFT, _TOP - 8, y_name)
    sheet.text(_LEFT + _WIDTH, _TOP + _HEIGHT + 38, x_name, anchor="end")
    for curve, color, width in ((list(values), _RAW, 1.0), (_running_mean(values), _SMOOTH, 2.0)):
        for index in range(1, len(curve)):
            if math.isfinite(curve[index - 1]) and math.isfinite(curve[index]):
                sheet.line(x(index), y(curve[index - 1]), x(index + 1), y(curve[index]), color, width=width)
    return sheet.render()


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each finite value and those before it, within a window of a twentieth of all; else NaN.

    A window is the end of one block of its length and the beginning of the next. Their sums are made once for each
    block, and nothing is subtracted, so that a spike costs those after it no digits.
    """
    window = max(1, len(values) // 20)
    pairs = [(value, 1) if math.isfinite(value) else (0.0, 0) for value in values]
    blocks = [pairs[start : start + window] for start in range(0, len(pairs), window)]
    upto = [pair for block in blocks for pair in accumulate(block, _plus)]
    since = [pair for block in blocks for pair in reversed(list(accumulate(reversed(block), _plus)))]
    means = []
    for index, value in enumerate(values):
        start = index - window + 1
        total, count = upto[index] if start <= 0 or start % window == 0 else _plus(since[start], upto[index])
        means.append(total / count if math.isfinite(value) else math.nan)
    return means


def _plus(first: tuple[float, int], second: tuple[float, int]) -> tuple[float, int]:
    return first[0] + second[0], first[1] + second[1]
