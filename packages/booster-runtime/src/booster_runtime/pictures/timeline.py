"""A rank's memory over time, with the phases of its steps in the background."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from booster_core.errors import ConfigError
from booster_runtime.pictures.axes import byte_ticks, format_bytes, format_seconds, ticks
from booster_runtime.pictures.svg import Drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 30, 64, 44
_WIDTH, _HEIGHT = 860, 280
_AREA, _GRID = "#4477aa", "#e4e4e4"
_PHASES = {"forward": "#dde8f3", "backward and step": "#f6ead0"}


class Phase(NamedTuple):
    """A part of a training step, in seconds since the first sample."""

    name: str
    start: float
    end: float


def draw_memory(samples: Sequence[tuple[float, int]], phases: Sequence[Phase], *, title: str) -> str:
    """Return memory over time as SVG: an area, with the peak and the phases of steps.

    Args:
        samples: Seconds and bytes, in the order of time.
        phases: What the rank did when.
        title: Printed above.

    Raises:
        ConfigError: If there are fewer than two samples.
    """
    if len(samples) < 2:
        msg = f"'{title}' has {len(samples)} samples, and a plot needs two."
        raise ConfigError(msg)
    start, end = samples[0][0], samples[-1][0]
    peak_at, peak = max(samples, key=lambda sample: sample[1])

    def x(at: float) -> float:
        return _LEFT + _WIDTH * (min(max(at, start), end) - start) / (end - start)

    def y(nbytes: float) -> float:
        return _TOP + _HEIGHT * (1 - nbytes / (peak * 1.08 or 1.0))

    bottom = _TOP + _HEIGHT
    sheet = Drawing(_LEFT + _WIDTH + _RIGHT, bottom + _BOTTOM)
    sheet.text(_LEFT, 26, title, size=15, color="#000000")
    for place, (name, color) in enumerate(_PHASES.items()):
        sheet.rectangle(_LEFT + 160 * place, 38, 12, 12, color)
        sheet.text(_LEFT + 160 * place + 18, 48, name)
    for phase in phases:
        length = f"{phase.name}: {format_seconds(phase.end - phase.start)}"
        color = _PHASES.get(phase.name, _GRID)
        sheet.rectangle(x(phase.start), _TOP, x(phase.end) - x(phase.start), _HEIGHT, color, title=length)
    for mark in byte_ticks(peak):
        sheet.line(_LEFT, y(mark), _LEFT + _WIDTH, y(mark), _GRID)
        sheet.text(_LEFT - 8, y(mark) + 4, format_bytes(mark), anchor="end")
    for mark in ticks(end - start):
        sheet.text(x(start + mark), bottom + 18, format_seconds(mark), anchor="middle")
    outline = [(x(at), y(nbytes)) for at, nbytes in _thinned(samples, (end - start) / _WIDTH)]
    for (x1, y1), (x2, y2) in pairwise(outline):
        sheet.line(x1, y1, x2, y2, _AREA, width=2)
    sheet.line(_LEFT, y(peak), _LEFT + _WIDTH, y(peak), "#b3401f", dashes="6 4")
    side = "end" if x(peak_at) > _LEFT + _WIDTH / 2 else "start"
    sheet.text(x(peak_at), y(peak) - 6, f"peak {format_bytes(peak)}", anchor=side, color="#b3401f")
    return sheet.render()


def _thinned(samples: Sequence[tuple[float, int]], interval: float) -> list[tuple[float, int]]:
    """Return the least and the most of the samples of each interval, without the middle of level stretches."""
    kept: list[tuple[float, int]] = []
    for _, group in groupby(samples, key=lambda sample: int(sample[0] / interval)):
        members = list(group)
        chosen = {min(members, key=lambda sample: sample[1]), max(members, key=lambda sample: sample[1])}
        kept += sorted(chosen)
    inner = (
        here
        for before, here, after in zip(kept, kept[1:], kept[2:], strict=False)
        if not before[1] == here[1] == after[1]
    )
    return [kept[0], *inner, kept[-1]]
