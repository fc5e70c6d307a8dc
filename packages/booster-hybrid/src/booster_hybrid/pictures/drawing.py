"""The picture of a batch: a row for each rank, a box for each microbatch in each stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_runtime.pictures import Drawing, format_seconds, ticks

if TYPE_CHECKING:
    from booster_hybrid.pictures.reading import Batch, Slice

COLORS = {
    "forward": "#4e79a7",
    "backward": "#59a14f",
    "backward_input": "#76b7b2",
    "backward_weight": "#edc948",
}
_LABELS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "gradients of inputs",
    "backward_weight": "gradients of weights",
}
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 90.0, 64.0, 40.0
_WIDTH, _ROW, _GAP = 1100.0, 30.0, 10.0
_LETTER = 7.0


def draw(batch: Batch) -> str:
    """Return the SVG of a batch.

    Boxes carry the number of their microbatch where it fits; later stages of a rank are drawn paler. On the right
    stands which part of the batch each rank did not compute.
    """
    height = _TOP + len(batch.ranks) * (_ROW + _GAP) + _BOTTOM
    sheet = Drawing(_LEFT + _WIDTH + _RIGHT, height)
    scale = _WIDTH / batch.seconds if batch.seconds > 0 else 0.0
    title = (
        f"Batch {batch.number}: {batch.num_microbatches} microbatches, {batch.num_stages} stages on "
        f"{len(batch.ranks)} ranks, {format_seconds(batch.seconds)}"
    )
    sheet.text(_LEFT, 22, title, size=14)
    sheet.text(_LEFT + _WIDTH + 10, _TOP - 10, "idle")
    _draw_legend(sheet, batch)
    bottom = height - _BOTTOM
    for tick in ticks(batch.seconds, 10):
        x = _LEFT + tick * scale
        sheet.line(x, _TOP - 4, x, bottom, "#dddddd")
        sheet.text(x, bottom + 16, format_seconds(tick), anchor="middle")
    for row, rank in enumerate(batch.ranks):
        y = _TOP + row * (_ROW + _GAP)
        sheet.rectangle(_LEFT, y, _WIDTH, _ROW, "#f2f2f2")
        sheet.text(_LEFT - 8, y + _ROW / 2 + 4, f"rank {rank.rank}", anchor="end")
        stages = sorted({each.stage for each in rank.slices})
        for each in rank.slices:
            _draw_slice(sheet, each, scale, y, opacity=1.0 - 0.45 * stages.index(each.stage) / len(stages))
        sheet.text(_LEFT + _WIDTH + 10, y + _ROW / 2 + 4, f"{rank.idle_share(batch.seconds):.1%}")
    return sheet.render()


def _draw_legend(sheet: Drawing, batch: Batch) -> None:
    done = {each.work for rank in batch.ranks for each in rank.slices}
    x = _LEFT
    for work, color in COLORS.items():
        if work in done:
            sheet.rectangle(x, 34, 12, 12, color)
            sheet.text(x + 17, 44, _LABELS[work])
            x += 40 + _LETTER * len(_LABELS[work])


def _draw_slice(sheet: Drawing, each: Slice, scale: float, y: float, opacity: float) -> None:
    x, width = _LEFT + each.start * scale, (each.stop - each.start) * scale
    title = (
        f"{_LABELS[each.work]}, stage {each.stage}, microbatch {each.microbatch}: "
        f"{format_seconds(each.stop - each.start)}"
    )
    # A hair's breadth between neighbours, as far as there is room for it.
    sheet.rectangle(x, y, max(width - 1, width / 2), _ROW, COLORS[each.work], title=title, opacity=opacity)
    number = str(each.microbatch)
    if width > _LETTER * (len(number) + 1):
        sheet.text(x + width / 2, y + _ROW / 2 + 4, number, anchor="middle", color="#000000")
