"""The results of the zoo's matrix: a JSON file for each model, and the table and the page that are written from them.

``python tests/shared/zoo_results.py RESULTS docs`` writes ``docs/tables/compatibility.csv`` and the page;
``python tests/shared/zoo_results.py docs`` writes the page again.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from isolated_libraries import FOLDER

COLUMNS = ("ddp", "fsdp", "zero", "gemini", "hybrid")
"""The plugins of the page."""
_LIBRARIES = ("torch", "transformers", "timm", "torchvision", "diffusers", "torchrec")
_HEAD = """# Compatibility: which models train under which plugin

Tiny models with random weights under each plugin on two ranks (gloo, fp32, CPU): transformers, timm, torchvision,
diffusers, torchrec, and models of our own with what large ones have (tied, frozen, unused, sparse, hooked parameters).
`nox -s models -- zoo` measures them: **[all cells](tables/compatibility.csv)**. A cell is **ok** if

- the gradient of each parameter equals that of one process in each of three steps, and so do the parameters after them,
  within 1e-5 of the tensor's largest value, or four times the distance of one process in fp32 to fp64 (with batch norm
  over few values: in fp64, within 1e-12);
- the checkpoint loads on one process with the same bits, and the other way round, and the next step equals its step;
- a model that is built lazily has the same bits as one that is built eagerly.

**refused** is a documented error on every rank. `zero` is stage 2; `hybrid` has `tp_size=2` where there is a plan or a
policy, else `zero_stage=1`.
"""


@dataclass(kw_only=True)
class Cell:
    """The result of a model under a plugin.

    Args:
        state: ``"ok"``, ``"refused"`` if a documented error was raised on every rank, or ``"fault"``.
        options: The plugin's options.
        findings: A sentence for each difference and error.
    """

    state: str
    options: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)


def read_cell(folder, name, plugin):
    """Return a recorded cell; ``None`` if there is none."""
    found = read(_file(folder, name)).get("cells", {}).get(plugin)
    return None if found is None else Cell(**found)


def write_cell(folder, name, plugin, cell):
    """Record a cell, with the versions of the libraries."""
    file = _file(folder, name)
    recorded = read(file)
    recorded["name"] = name
    recorded["versions"] = {library: found for library in _LIBRARIES if (found := _version(library))}
    recorded.setdefault("cells", {})[plugin] = asdict(cell)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(recorded, indent=1, sort_keys=True), encoding="utf-8")
    partial.replace(file)


def cell_of(folder, name, column, measure):
    """Return a cell, and measure it unless it is recorded in a folder, if there is one; also keep the text of a fault.

    Args:
        folder: Where cells are collected; ``None`` for nowhere.
        name: Of the row.
        column: Of the cell.
        measure: Called with both; returns the cell, and the whole error if there is one.
    """
    cell = read_cell(folder, name, column) if folder else None
    if cell is None:
        cell, text = measure(name, column)
        if folder:
            write_cell(folder, name, column, cell)
            if cell.state in ("wrong", "crash"):
                (folder / f"{name}.{column}.txt").write_text(text, encoding="utf-8")
    return cell


def table(recorded):
    """Return a row of text for each model, in the order of their names, from the contents of the files."""
    rows = []
    for model in sorted(recorded, key=lambda each: str(each["name"])):
        row = {"model": model["name"], **{column: _text(model["cells"][column]) for column in COLUMNS}}
        row["mesh of hybrid"] = "tp" if "tp_size" in model["cells"]["hybrid"]["options"] else "dp"
        libraries = (library for library in _LIBRARIES if library in model["versions"])
        row["versions"] = ", ".join(f"{library} {model['versions'][library]}" for library in libraries)
        rows.append(row)
    return rows


def page(rows):
    """Return the page of a table: how many cells have which state, faults, and why cells are refused."""
    cells = [(row["model"], column, row[column]) for row in rows for column in COLUMNS]
    states = [text.partition(":")[0] for _, _, text in cells]
    counted = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "refused", "fault"))
    versions = max(row["versions"] for row in rows)
    meshes = [row["mesh of hybrid"] for row in rows]
    parts = [
        _HEAD,
        f"Measured with {versions}: {len(rows)} models, {len(cells)} cells: {counted}.\n",
        f"Under hybrid, {meshes.count('tp')} models have `tp_size=2`.\n",
    ]
    faults = [f"- {model}, {column}: {text}" for model, column, text in cells if text.startswith("fault")]
    if faults:
        parts += ["## Faults\n", "\n".join(faults) + "\n"]
    refused = defaultdict(lambda: defaultdict(list))
    for model, column, text in cells:
        if text.startswith("refused"):
            refused[_first_sentence(text.partition(": ")[2])][model].append(column)
    if refused:
        lines = ["| model | plugins | refused with |", "|---|---|---|"]
        for reason, models in refused.items():
            alike = defaultdict(list)
            for model, columns in models.items():
                alike[", ".join(columns)].append(model)
            lines += [f"| {', '.join(names)} | {columns} | {reason} |" for columns, names in alike.items()]
        parts += ["## What is refused\n", "\n".join(lines) + "\n"]
    return "\n".join(parts)


def _first_sentence(text):
    """Return what is wrong; the remedies that follow are in the table of all cells."""
    return re.split(r"(?<=[a-z0-9)'`])\. (?=[A-Z`'])", text)[0].rstrip(".")


def write_table(rows, path):
    """Write rows as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_table(path):
    """Return the rows that `write_table` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _text(cell):
    """Return the text of a cell."""
    findings = " | ".join(map(_shown, cell["findings"]))
    return f"{cell['state']}: {findings}" if findings else str(cell["state"])


def _shown(text):
    """Return a finding as plain text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:397]}..."


def _file(folder, name):
    return folder / f"{name.replace('/', '.')}.json"


def read(file):
    """Return the content of a file; nothing where it is not there."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _version(library):
    """Return a library's version without its build, also of one in the separate folder, which stays unimportable."""
    found = next(iter(distributions(name=library, path=[*sys.path, str(FOLDER)])), None)
    return None if found is None else found.version.split("+")[0]


def main():
    """Write the table where results are given, and the page."""
    *results, docs = map(Path, sys.argv[1:])
    path = docs / "tables" / "compatibility.csv"
    if results:
        write_table(table(map(read, results[0].glob("*.json"))), path)
    (docs / "compatibility.md").write_text(page(read_table(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
