"""`Drawing`: shapes and words on a sheet, as SVG. What they mean is the caller's business."""

from __future__ import annotations

from html import escape

_FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"


class Drawing:
    """A white sheet. Coordinates are pixels, from the upper left corner.

    Args:
        width: Width of the sheet.
        height: Height of the sheet.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._shapes: list[str] = []

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "", opacity: float = 1.0
    ) -> None:
        """Draw a filled rectangle, with a tooltip where there is a title."""
        look = f"fill='{fill}'" + (f" fill-opacity='{opacity:g}'" if opacity < 1 else "")
        shape = f"<rect x='{_n(x)}' y='{_n(y)}' width='{_n(width)}' height='{_n(height)}' {look}"
        self._shapes.append(f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, color: str, *, width: float = 1.0, dashes: str = ""
    ) -> None:
        """Draw a straight line; ``dashes`` as in SVG, such as ``"6 4"``."""
        look = f"stroke='{color}' stroke-width='{width:g}'" + (f" stroke-dasharray='{dashes}'" if dashes else "")
        self._shapes.append(f"<line x1='{_n(x1)}' y1='{_n(y1)}' x2='{_n(x2)}' y2='{_n(y2)}' {look}/>")

    def text(
        self, x: float, y: float, words: str, *, size: float = 11, anchor: str = "start", color: str = "#333333"
    ) -> None:
        """Write words; ``anchor`` says which end is at the place: ``"start"``, ``"middle"`` or ``"end"``."""
        self._shapes.append(
            f"<text x='{_n(x)}' y='{_n(y)}' font-size='{size:g}' text-anchor='{anchor}' fill='{color}' {_FONT}>"
            f"{escape(words)}</text>"
        )

    def render(self) -> str:
        """Return the SVG document."""
        size = f"width='{_n(self.width)}' height='{_n(self.height)}'"
        view = f"viewBox='0 0 {_n(self.width)} {_n(self.height)}'"
        body = "\n".join(self._shapes)
        head = f"<svg xmlns='http://www.w3.org/2000/svg' {size} {view}>"
        return f"{head}\n<rect width='100%' height='100%' fill='white'/>\n{body}\n</svg>\n"


def _n(value: float) -> str:
    """Return a coordinate with as many digits as anybody sees."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
