"""SVG as PNG, by a renderer that is an extra of booster-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def write_png(svg: str, path: Path, *, zoom: float = 2.0) -> None:
    """Write an SVG document as a PNG file.

    Args:
        svg: The document.
        path: Where to write.
        zoom: Pixels of the file for each pixel of the document.

    Raises:
        ConfigError: If the renderer is not installed.
    """
    try:
        import resvg_py
    except ImportError as cause:
        msg = (
            f"PNG needs the package `resvg-py`, which can't be imported ({cause}). Run `pip install "
            "'booster-runtime[pictures]'`, or take the SVG."
        )
        raise ConfigError(msg) from cause
    path.write_bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom))
