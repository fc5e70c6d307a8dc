"""Show what a checkpoint holds; with --check, read it all.

The work is in `booster_checkpoint.tools.inspection`; torch is imported when it starts.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click


@click.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--check", "is_checked", is_flag=True, help="Read all of it, and say what is wrong.")
def command(*, path: str, as_json: bool, is_checked: bool) -> None:
    """Show what PATH holds: tensors, shapes, dtypes, bytes, files, and what wrote it. Reads headers only.

    PATH is a file, an index or a folder with a model or an optimizer in any form, a saved training state, or the folder
    of several; or the URL of one of them.

    With --check, compare checksums with its manifest, headers with its index, and sizes, and show that in place of what
    it holds. The exit status is 1 if anything is wrong.
    """
    from booster_checkpoint.storage import locate
    from booster_checkpoint.tools.inspection import check, inspect

    if is_checked:
        _show_check(path, *check(locate(path)), as_json=as_json)
        return
    found = inspect(locate(path))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found), indent=2, default=str))
        return
    click.echo(f"{path}: {found.kind}")
    for name, value in found.facts.items():
        for line in _lines(name, value):
            click.echo(f"  {line}")
    if found.tensors:
        header = ("TENSOR", "DTYPE", "SHAPE", "BYTES", "FILE")
        rows = [(row.name, row.dtype, _shape(row.shape), f"{row.nbytes:,}", row.file) for row in found.tensors]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for cells in (header, *rows):
            name, dtype, shape, nbytes, file = cells
            left = f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {nbytes:>{widths[3]}}"
            click.echo(f"{left}  {file}")
    files = {row.file for row in found.tensors}
    total = sum(row.nbytes for row in found.tensors)
    if found.kind != "root":
        click.echo(f"{len(found.tensors)} tensors, {total:,} bytes, {len(files)} files")


def _show_check(path: str, problems: list[str], checked: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"problems": problems, "checked": checked}, indent=2))
    else:
        for problem in problems:
            click.echo(problem, err=True)
        if not problems:
            click.echo(f"{path}: whole (checked {checked})")
    if problems:
        raise SystemExit(1)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _lines(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}: " + ", ".join(f"{key} {item}" for key, item in value.items())]
    if isinstance(value, list) and len(value) > 1 and name == "parameter groups":
        return [f"{name}:", *(f"  {item}" for item in value)]
    if isinstance(value, list):
        return [f"{name}: " + (", ".join(map(str, value)) or "none")]
    return [f"{name}: {'none' if value is None else value}"]
