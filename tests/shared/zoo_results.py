"""The results of the zoo's matrix: a JSON file for each model, and the page that is written from them.

``python tests/shared/zoo_results.py RESULTS PAGE`` writes the page.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isolated_libraries import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable

COLUMNS = ("ddp", "fsdp", "zero", "gemini", "hybrid")
"""The plugins of the page."""
_LIBRARIES = ("torch", "transformers", "timm", "torchvision", "diffusers", "torchrec")
_HEAD = """# Compatibility

Each row is a tiny model with random weights, each column a plugin on two ranks (gloo, fp32, CPU). `nox -s zoo` measures
every cell and writes this page. A cell is **ok** if all of these hold:

- the gradient of each parameter equals that of one process in each of three steps, and so do the parameters after them;
- the checkpoint (model and optimizer) loads on one process with the same bits, and the next step equals that of one
  process;
- the checkpoint of one process loads under the plugin with the same bits, and the next step equals that of one process;
- a model that is built lazily has the same bits as one that is built eagerly.

"Equals" means: within 1e-5 of the tensor's largest value, or four times the distance of one process in fp32 to fp64
(for gradients, the largest of the steps); models with batch norm over few values are trained in fp64, within 1e-12.
**refused** is a documented error, raised on every rank. A number alone is a fault: its footnote has the first line of
the error, or the tensor that differs most.

Plugins: `ddp`; `fsdp`; `zero` in stage 2; `gemini`; `hybrid` with `tp_size=2` (marked "tp") where there is a policy or
a plan of transformers, else with `zero_stage=1` (marked "dp").
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

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def read_cell(folder: Path, name: str, plugin: str) -> Cell | None:
    """Return a recorded cell; ``None`` if there is none."""
    found = _read(_file(folder, name)).get("cells", {}).get(plugin)
    return None if found is None else Cell(**found)


def write_cell(folder: Path, name: str, plugin: str, cell: Cell) -> None:
    """Record a cell, with the versions of the libraries."""
    file = _file(folder, name)
    recorded = _read(file)
    recorded["name"] = name
    recorded["versions"] = {library: found for library in _LIBRARIES if (found := _version(library))}
    recorded.setdefault("cells", {})[plugin] = cell.to_json()
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(recorded, indent=1, sort_keys=True), encoding="utf-8")
    partial.replace(file)


def page(recorded: Iterable[dict[str, Any]], names: Iterable[str] = ()) -> str:
    """Return the page of recorded models, in the order of their names.

    Args:
        recorded: The contents of the files.
        names: All models; the page lists those that are not recorded.
    """
    models = sorted(recorded, key=lambda each: each["name"])
    rest = sorted(set(names) - {model["name"] for model in models})
    numbers: dict[str, int] = {}
    rows = []
    for model in models:
        cells = (_text(model["cells"].get(column), column, numbers) for column in COLUMNS)
        rows.append(f"| {model['name']} | {' | '.join(cells)} |")
    versions = {library: found for model in models for library, found in model["versions"].items()}
    listed = ", ".join(f"{library} {versions[library]}" for library in _LIBRARIES if library in versions)
    states = [cell["state"] for model in models for key, cell in model["cells"].items() if key in COLUMNS]
    counted = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "refused", "fault"))
    missing = len(models) * len(COLUMNS) - len(states)
    counted += f", {missing} not measured (-)" if missing else ""
    parts = [
        _HEAD,
        f"Measured with {listed}. {len(models)} models, {len(states)} cells: {counted}.\n",
        "\n".join([f"| model | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|", *rows]) + "\n",
    ]
    if rest:
        parts.append(f"Not measured yet ({len(rest)}): {', '.join(rest)}.\n")
    if numbers:
        parts.append("\n".join(f"{number}. {text}" for text, number in numbers.items()) + "\n")
    return "\n".join(parts)


def _text(cell: dict[str, Any] | None, column: str, numbers: dict[str, int]) -> str:
    """Return the text of a cell; number its findings."""
    if cell is None:
        return "-"
    notes = ", ".join(f"[{numbers.setdefault(_shown(text), len(numbers) + 1)}]" for text in cell["findings"])
    mesh = "" if column != "hybrid" else " tp" if "tp_size" in cell["options"] else " dp"
    return {"ok": "ok", "refused": f"refused {notes}", "fault": notes}[cell["state"]] + mesh


def _shown(text: str) -> str:
    """Return a finding as plain text of a list, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:397]}..."


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '.')}.json"


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def _version(library: str) -> str | None:
    """Return a library's version without its build, also of one in the separate folder, which stays unimportable."""
    found = next(iter(distributions(name=library, path=[*sys.path, str(FOLDER)])), None)
    return None if found is None else found.version.split("+")[0]


def main() -> None:
    """Write the page."""
    from model_zoo import MATRIX

    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    recorded = [_read(file) for file in sorted(folder.glob("*.json"))]
    target.write_text(page(recorded, MATRIX), encoding="utf-8")


if __name__ == "__main__":
    main()
