"""The picture of a plan: bytes on a rank by kind for each setting, with the line of a device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_runtime.pictures import Drawing, byte_ticks, format_bytes, format_seconds

if TYPE_CHECKING:
    from booster_tools.planning.ranking import Plan

_KINDS = {
    "parameters": ("parameter_bytes", "#4477aa"),
    "gradients": ("gradient_bytes", "#66ccee"),
    "optimizer state": ("optimizer_bytes", "#228833"),
    "others that stay": ("other_bytes", "#aa3377"),
    "transient": ("activation_bytes", "#cccccc"),
}
_LEFT, _WIDTH, _RIGHT, _TOP, _ROW = 400, 460, 250, 84, 24
_LIMIT, _GRID = "#b3401f", "#e4e4e4"


def draw_plan(found: Plan) -> str:
    """Return a bar for each setting that could be planned, best first, as SVG.

    Args:
        found: What `plan` returned.
    """
    planned = [(each, each.prediction) for each in found.settings if each.prediction is not None]
    memory = found.settings[0].devices.memory_bytes if found.settings else 0
    most = max((prediction.peak_bytes for _, prediction in planned), default=1)
    shows_limit = memory <= 3 * most  # else the bars would be too short to compare
    highest = 1.05 * (max(most, memory) if shows_limit else most)

    def x(nbytes: float) -> float:
        return _LEFT + _WIDTH * nbytes / highest

    bottom = _TOP + _ROW * len(planned)
    sheet = Drawing(_LEFT + _WIDTH + _RIGHT, bottom + 40)
    number = planned[0][0].devices.number if planned else 0
    sheet.text(20, 26, f"Bytes of a rank at the peak of a step, on {number} devices", size=15, color="#000000")
    place = 20.0
    for name, (_, color) in _KINDS.items():
        sheet.rectangle(place, 42, 12, 12, color)
        sheet.text(place + 18, 52, name)
        place += 40 + 7 * len(name)
    for mark in byte_ticks(highest):
        sheet.line(x(mark), _TOP - 6, x(mark), bottom, _GRID)
        sheet.text(x(mark), bottom + 18, format_bytes(mark), anchor="middle")
    for row, (setting, prediction) in enumerate(planned):
        y = _TOP + _ROW * row
        text = str(setting.candidate)
        sheet.text(_LEFT - 10, y + 16, text if len(text) < 58 else f"{text[:55]}...", anchor="end")
        total = 0
        for name, (attribute, color) in _KINDS.items():
            nbytes = getattr(prediction, attribute)
            title = f"{name}: {format_bytes(nbytes)}"
            sheet.rectangle(x(total), y + 3, x(total + nbytes) - x(total), _ROW - 6, color, title=title)
            total += nbytes
        words = f"{format_bytes(prediction.peak_bytes)}, {format_seconds(setting.step_seconds)} a step"
        color = "#333333" if setting.fits else _LIMIT
        sheet.text(_LEFT + _WIDTH + 10, y + 16, words if setting.fits else f"{words}, too much", color=color)
    if shows_limit:
        sheet.line(x(memory), _TOP - 10, x(memory), bottom, _LIMIT, width=2, dashes="6 4")
        sheet.text(x(memory), _TOP - 14, f"memory of a device: {format_bytes(memory)}", anchor="middle", color=_LIMIT)
    return sheet.render()
