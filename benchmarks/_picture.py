"""Pictures of figures, drawn by matplotlib for light and dark pages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

_LIGHT = {"ink": "#333333", "paper": "#ffffff", "grid": "#e4e4e4"}
_DARK = {"ink": "#d5d7da", "paper": "#1e2129", "grid": "#3a3f4b"}


@contextlib.contextmanager
def picture(
    path: Path, *, inches: tuple[float, float], title: str, rows: int = 1, dark: bool = False
) -> Iterator[Sequence[Axes]]:
    """Draw axes above each other in a ``with``, and write them at its end, unless it raises.

    Args:
        path: Where to write; its ending is the format.
        inches: Width and height, of 100 pixels each.
        title: Printed above.
        rows: How many axes there are.
        dark: Whether the paper is dark.
    """
    colors = _DARK if dark else _LIGHT
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    settings = dict.fromkeys(inks, colors["ink"]) | dict.fromkeys(papers, colors["paper"])
    fixed = {"svg.hashsalt": "booster", "svg.fonttype": "none"}  # the same file each time, with words that are words
    look = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "font.size": 9}
    all_settings: Any = settings | fixed | look | {"grid.color": colors["grid"], "legend.frameon": False}
    with rc_context(all_settings):
        figure = Figure(figsize=inches, layout="constrained")
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=11)
        found: list[Axes] = [*figure.subplots(rows, sharex=True, squeeze=False)[:, 0]]
        for axes in found:
            axes.grid(visible=True)
        yield found
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {".svg": {"Date": None}}.get(path.suffix)  # else the file tells the time of writing
        figure.savefig(path, dpi=150, metadata=metadata)
