"""Pictures of runs, for verbs of the ``booster`` command: SVG, PNG where a renderer is there, and traces.

Nothing here imports torch.
"""

from __future__ import annotations

from booster_runtime.pictures.axes import byte_ticks, format_bytes, format_seconds, ticks
from booster_runtime.pictures.curves import draw_curve
from booster_runtime.pictures.png import write_png
from booster_runtime.pictures.svg import Drawing
from booster_runtime.pictures.timeline import Phase, draw_memory
from booster_runtime.pictures.trace import Trace, read_traces

__all__ = [
    "Drawing",
    "Phase",
    "Trace",
    "byte_ticks",
    "draw_curve",
    "draw_memory",
    "format_bytes",
    "format_seconds",
    "read_traces",
    "ticks",
    "write_png",
]
