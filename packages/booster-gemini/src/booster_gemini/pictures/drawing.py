"""The picture of a step: bytes by kind over time under the budget's line, bytes elsewhere, and every chunk's places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_gemini.pictures.levels import GATHERED, OTHER, ROLES, columns, least_of_process, samples
from booster_runtime.pictures import Drawing, byte_ticks, format_bytes, format_seconds, ticks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from booster_gemini.pictures.levels import Sample
    from booster_gemini.pictures.reading import Record, Stay, Step

_COLORS = {"param": "#4477aa", "grad": "#66ccee", "optim": "#228833", GATHERED: "#aa3377", OTHER: "#cccccc"}
_NAMES = {
    "param": "parameters",
    "grad": "gradients",
    "optim": "optimizer state",
    GATHERED: "gathered chunks",
    OTHER: "activations and others",
}
_MOVES = {"coming": "#ccbb44", "leaving": "#ee6677"}
_AWAY = "#e8e8e8"
_PHASES = {"forward": "#dde8f3", "backward": "#e3f1dd", "step": "#f6ead0"}

_LEFT, _RIGHT, _TOP, _WIDTH = 104, 30, 106, 960
_MAIN, _BELOW, _GAP = 300, 90, 44
_ROWS_HEIGHT, _MOST_ROW = 420, 10


def draw(record: Record, step: Step) -> str:
    """Return the picture of one step as SVG.

    Args:
        record: The record that the step is of.
        step: One of its steps.
    """
    device = record.facts.get("device", "cpu")
    seconds = max(step.end - step.start, 1e-9)
    found = samples(step, device, least_of_process(record))
    shown = list(columns(found, seconds, _WIDTH))
    rows = sorted({(ROLES.index(stay.role), stay.chunk) for stay in step.stays})
    row_height = min(_MOST_ROW, _ROWS_HEIGHT / max(len(rows), 1))
    map_top = _TOP + _MAIN + _BELOW + 2 * _GAP
    sheet = Drawing(_LEFT + _WIDTH + _RIGHT, map_top + row_height * len(rows) + 60)
    _head(sheet, record, step, seconds)
    _phases(sheet, step, seconds, map_top + row_height * len(rows))
    budget = record.facts.get("budget_bytes")
    here = [(kind, _COLORS[kind], [sample.here.get(kind, 0) for sample in shown]) for kind in _NAMES]
    name = "host memory" if device == "cpu" else f"memory of {device}"
    _stack(sheet, _TOP, _MAIN, name, here, budget)
    _stack(sheet, _TOP + _MAIN + _GAP, _BELOW, "elsewhere", _elsewhere(shown), None)
    _map(sheet, map_top, row_height, rows, step, device)
    _time_axis(sheet, map_top + row_height * len(rows), seconds)
    return sheet.render()


def _head(sheet: Drawing, record: Record, step: Step, seconds: float) -> None:
    facts = record.facts
    budget = facts.get("budget_bytes")
    words = [
        f"rank {facts.get('rank', 0)}, step {step.number}",
        format_seconds(seconds),
        f"policy {facts.get('policy')}",
        "no budget" if budget is None else f"budget {format_bytes(budget)}",
        f"{step.unplanned} events that were not foreseen",
    ]
    sheet.text(_LEFT, 24, " - ".join(words), size=14, color="#000000")
    x = float(_LEFT)
    legend = [(_NAMES[kind], color) for kind, color in _COLORS.items()]
    for name, color in [*legend, *_MOVES.items(), ("elsewhere", _AWAY)]:
        sheet.rectangle(x, 38, 12, 12, color)
        sheet.text(x + 16, 48, name)
        x += 30 + 6.2 * len(name)


def _phases(sheet: Drawing, step: Step, seconds: float, bottom: float) -> None:
    for start, end, phase in step.phases():
        x, width = _LEFT + _x(start - step.start, seconds), _x(end - start, seconds)
        sheet.rectangle(x, _TOP - 42, width, bottom - _TOP + 42, _PHASES[phase], opacity=0.6)
        if width > 7 * len(phase):
            sheet.text(x + width / 2, _TOP - 28, phase, anchor="middle")


def _stack(
    sheet: Drawing,
    top: float,
    height: float,
    name: str,
    series: Sequence[tuple[str, str, list[int]]],
    budget: int | None,
) -> None:
    """Draw series on top of each other."""
    totals = [sum(column) for column in zip(*(values for _, _, values in series), strict=True)]
    highest: float = 1.05 * max(1, *totals, budget or 0)
    bottom = top + height

    def y(value: float) -> float:
        return bottom - height * value / highest

    for tick in byte_ticks(highest, 5 if height > _BELOW else 2):
        sheet.line(_LEFT, y(tick), _LEFT + _WIDTH, y(tick), "#dddddd")
        sheet.text(_LEFT - 6, y(tick) + 4, format_bytes(tick), anchor="end")
    base = [0] * _WIDTH
    for label, color, values in series:
        if any(values):
            above = [low + value for low, value in zip(base, values, strict=True)]
            title = f"{_NAMES.get(label, label)}: at most {format_bytes(max(values))}"
            sheet.polygon([*_outline(above, y), *reversed(_outline(base, y))], color, title=title)
            base = above
    sheet.text(_LEFT, top - 6, f"{name}: at most {format_bytes(max(totals))}", color="#000000")
    if budget is not None:
        sheet.line(_LEFT, y(budget), _LEFT + _WIDTH, y(budget), "#cc0000", width=1.5, dashes="7 4")
        sheet.text(_LEFT + _WIDTH, y(budget) - 4, f"budget {format_bytes(budget)}", anchor="end", color="#cc0000")


def _outline(values: Sequence[int], y: Callable[[float], float]) -> list[tuple[float, float]]:
    """Return the corners of a line of steps, leaving out those within a level stretch."""
    points: list[tuple[float, float]] = []
    last = None
    for column, value in enumerate(values):
        if value != last:
            if last is not None:
                points.append((_LEFT + column, y(last)))
            points.append((_LEFT + column, y(value)))
            last = value
    return [*points, (_LEFT + len(values), y(last or 0))]


def _elsewhere(shown: Sequence[Sample]) -> list[tuple[str, str, list[int]]]:
    keys = sorted({key for sample in shown for key in sample.elsewhere})
    return [
        (f"{_NAMES[role]}, {place}", _COLORS[role], [sample.elsewhere.get((place, role), 0) for sample in shown])
        for place, role in keys
    ] or [("nothing", _AWAY, [0] * len(shown))]


def _map(
    sheet: Drawing, top: float, row_height: float, rows: Sequence[tuple[int, int]], step: Step, device: str
) -> None:
    """Draw a row for each block: where it was from when to when."""
    seconds = max(step.end - step.start, 1e-9)
    place_of = {row: index for index, row in enumerate(rows)}
    sheet.text(_LEFT, top - 6, "where each chunk's part lay", color="#000000")
    for order, role in enumerate(ROLES):
        own = [index for row, index in place_of.items() if row[0] == order]
        if own:
            sheet.text(_LEFT - 6, top + row_height * (own[0] + len(own) / 2) + 4, _NAMES[role], anchor="end")
            sheet.line(_LEFT - 60, top + row_height * own[0], _LEFT, top + row_height * own[0], "#999999")
    for stay in step.stays:
        x, width = _x(stay.start - step.start, seconds), _x(stay.end - stay.start, seconds)
        y = top + row_height * place_of[ROLES.index(stay.role), stay.chunk]
        sheet.rectangle(_LEFT + x, y, max(width, 0.3), row_height, _color(stay, device), title=_title(stay))


def _color(stay: Stay, device: str) -> str:
    return _COLORS[stay.role] if stay.place == device else _MOVES.get(stay.place, _AWAY)


def _title(stay: Stay) -> str:
    where = stay.place if stay.place in _MOVES else f"in {stay.place}"
    size, time = format_bytes(stay.num_bytes), format_seconds(stay.end - stay.start)
    return f"{_NAMES[stay.role]} of chunk {stay.chunk}, {size}: {where} for {time}"


def _time_axis(sheet: Drawing, bottom: float, seconds: float) -> None:
    for tick in ticks(seconds, 10):
        x = _LEFT + _x(tick, seconds)
        sheet.line(x, bottom, x, bottom + 5, "#333333")
        sheet.text(x, bottom + 18, format_seconds(tick), anchor="middle")


def _x(seconds: float, whole: float) -> float:
    return _WIDTH * seconds / whole
