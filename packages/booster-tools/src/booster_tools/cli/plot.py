"""Draw what a run left: tracked values, or memory over time.

The files are what `booster_tools.tracking.JsonLines` and `watch_memory` write.
"""

from __future__ import annotations

import math
from pathlib import Path

import click

_TRACE = ".trace.json"


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("names", nargs=-1)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the pictures; that of PATH.")
@click.option("--svg", is_flag=True, help="Write SVG in the place of PNG.")
@click.option("--dark", is_flag=True, help="Draw for dark pages.")
def command(*, path: Path, names: tuple[str, ...], out: Path | None, svg: bool, dark: bool) -> None:
    """Draw the values NAMES of the run in PATH, a file of JSON lines; without NAMES, all of them.

    `steps_per_second` is drawn from the seconds of each step. Of a rank's trace, PATH ending in .trace.json, the memory
    over time is drawn, and NAMES are those of its counters.
    """
    from booster_runtime.trace import read_trace
    from booster_tools.pictures import check_picture, draw_curve, draw_memory
    from booster_tools.tracking.json_lines import read_json_lines

    folder, ending = out or path.parent, ".svg" if svg else ".png"
    check_picture(folder / f"picture{ending}")
    if path.name.endswith(_TRACE):
        stem = path.name.removesuffix(_TRACE)
        target = folder / f"{stem}{ending}"
        draw_memory(read_trace(path), target, title=stem, counters=names, dark=dark)
        click.echo(target)
        return
    curves = _curves(read_json_lines(path))
    if unknown := [name for name in names if name not in curves]:
        msg = f"{path} has no values named {', '.join(unknown)}. It has: {', '.join(curves) or 'none'}."
        raise click.ClickException(msg)
    for name in names or curves:
        steps, values = curves[name].keys(), curves[name].values()
        if not any(map(math.isfinite, values)):
            click.echo(f"{name}: no finite value", err=True)
            continue
        target = folder / f"{name.replace('/', '-')}{ending}"
        draw_curve([*steps], [*values], target, title=name, y_name=name.replace("_", " "), dark=dark)
        click.echo(target)


def _curves(rows: list[dict[str, float]]) -> dict[str, dict[int, float]]:
    """Return each value's steps and what it was then, by its name; steps without it are left out."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name not in ("step", "seconds")}
        if row.get("seconds"):
            values["steps_per_second"] = 1 / row["seconds"]
        for name, value in values.items():
            if row["step"] >= 1:
                curves.setdefault(name, {})[int(row["step"])] = value
    return curves
