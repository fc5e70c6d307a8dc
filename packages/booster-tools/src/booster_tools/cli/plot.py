"""Draw the values of a run that were tracked in a file of JSON lines, such as its loss and its steps per second.

The file is what `booster_tools.tracking.JsonLines` writes.
"""

from __future__ import annotations

import math
from pathlib import Path

import click

from booster_core.errors import BoosterError


@click.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("names", nargs=-1)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the pictures; that of PATH.")
@click.option("--svg", is_flag=True, help="Write SVG, which needs no renderer, in the place of PNG.")
def command(*, path: Path, names: tuple[str, ...], out: Path | None, svg: bool) -> None:
    """Draw the values NAMES of the run in PATH, a file of JSON lines; without NAMES, all of them.

    `steps_per_second` is drawn from the seconds of each step.
    """
    from booster_runtime.pictures import draw_curve, write_png
    from booster_tools.tracking.json_lines import read_json_lines

    try:
        curves = _curves(read_json_lines(path))
        if unknown := [name for name in names if name not in curves]:
            msg = f"{path} has no values named {', '.join(unknown)}. It has: {', '.join(curves) or 'none'}."
            raise click.ClickException(msg)
        folder = out or path.parent
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or curves:
            if not any(map(math.isfinite, curves[name])):
                click.echo(f"{name}: no finite value", err=True)
                continue
            target = folder / f"{name.replace('/', '-')}.{'svg' if svg else 'png'}"
            drawing = draw_curve(curves[name], title=name, y_name=name.replace("_", " "))
            if svg:
                target.write_text(drawing, encoding="utf-8")
            else:
                write_png(drawing, target)
            click.echo(target)
    except BoosterError as error:
        raise click.ClickException(str(error)) from error


def _curves(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return one value for each step from 1 to the last, by name, NaN where a step has none."""
    last = max((int(row["step"]) for row in rows), default=0)
    curves: dict[str, list[float]] = {}
    for row in rows:
        values = {name: value for name, value in row.items() if name not in ("step", "seconds")}
        if row.get("seconds"):
            values["steps_per_second"] = 1 / row["seconds"]
        for name, value in values.items():
            if row["step"] >= 1:
                curves.setdefault(name, [math.nan] * last)[int(row["step"]) - 1] = value
    return curves
