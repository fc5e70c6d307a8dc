"""The recorded cells of the table of families, and the page that shows them.

``python tests/shared/family_results.py RESULTS PAGE`` writes the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

COLUMNS = ("tp", "pp", "split_gather", "ulysses", "ring", "ep")
PLAIN = "plain"
"""The cell of one process: whether the model can be trained at all, and facts about it."""
STATES = {
    "exact": "exact",
    "refused": "refused",
    "refused late": "refused in the first step",
    "wrong": "**WRONG**",
    "crash": "**crash**",
}
"""How the page shows the state of a cell."""
_LONGEST = 240
_HEAD = """# Families

Each row is a family of transformers with a causal language model, as a tiny model with random weights; each column is a
way in which the hybrid plugin splits it over two ranks (gloo, fp32, CPU). `nox -s families` measures every cell and
writes this page.

- **exact**: outputs, losses, the gradient of each parameter and its update by a step equal those of one process, as
  compared by `booster_tools.verify`: within 1e-4 of each tensor's norm in fp32, or else 1e-5 in fp64.
- **refused**: `boost` raises a `ConfigError` on every rank, with the reason in the footnote; nothing was trained.
- **WRONG** and **crash** are faults: another result than that of one process, and any other error.
- **-**: the model has no experts.

Columns: `tp` is `tp_size=2`; `pp` is `pp_size=2` with two microbatches; `split_gather` is
`sequence_parallelism_mode="split_gather"` with `tp_size=2`; `ulysses` and `ring` are `"all_to_all"` and `"ring_attn"`
with `sp_size=2`; `ep` is `ep_size=2`, for mixtures of experts. `boost` is given a batch, as `example_batch` under `pp`
and by a data loader under `ulysses` and `ring`. Models are split by the policy in the last column:
transformers' plan, ours, or none; a family without one is refused unless you [write a policy](sharding-policies.md).
"""


def page(recorded: Iterable[dict[str, Any]], names: Iterable[str] = ()) -> str:
    """Return the page of recorded families, in the order of their names.

    Args:
        recorded: The contents of the files.
        names: All families; the page lists those that are not recorded.
    """
    families = sorted(recorded, key=lambda each: each["name"])
    measured = [each for each in families if each["cells"].get(PLAIN, {}).get("state") == "ok"]
    others = [each for each in families if each not in measured]
    rest = sorted(set(names) - {each["name"] for each in families})
    numbers: dict[str, int] = {}
    rows = []
    for each in measured:
        cells = " | ".join(_text(each, column, numbers) for column in COLUMNS)
        rows.append(f"| {each['name']} | {cells} | {each['cells'][PLAIN]['options']['policy']} |")
    versions = {library: found for each in families for library, found in each["versions"].items()}
    listed = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    parts = [
        _HEAD,
        f"Measured with {listed}: {len(measured)} families.\n",
        _totals(measured),
        "\n".join([f"| family | {' | '.join(COLUMNS)} | policy |", "|---" * (len(COLUMNS) + 2) + "|", *rows]) + "\n",
    ]
    if others:
        listed = "\n".join(f"- {each['name']}: {_shown(_reason(each), each)}" for each in others)
        parts.append(f"Not measured ({len(others)}), because the tiny model could not be trained in one process:\n")
        parts.append(f"{listed}\n")
    if rest:
        parts.append(f"Not measured yet ({len(rest)}): {', '.join(rest)}.\n")
    if numbers:
        parts.append("\n".join(f"{number}. {text}" for text, number in numbers.items()) + "\n")
    return "\n".join(parts)


def _totals(families: list[dict[str, Any]]) -> str:
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for state, shown in STATES.items():
        counts = [sum(each["cells"].get(column, {}).get("state") == state for each in families) for column in COLUMNS]
        if state in ("exact", "refused", "wrong") or any(counts):
            lines.append(f"| {shown} | {' | '.join(map(str, counts))} |")
    missing = [
        sum(column not in each["cells"] and not _is_without_experts(each, column) for each in families)
        for column in COLUMNS
    ]
    if any(missing):
        lines.append(f"| not measured yet | {' | '.join(map(str, missing))} |")
    return "\n".join(lines) + "\n"


def _text(family: dict[str, Any], column: str, numbers: dict[str, int]) -> str:
    """Return the text of a cell; number its findings."""
    cell = family["cells"].get(column)
    if cell is None:
        return "-" if _is_without_experts(family, column) else "not yet"
    notes = "".join(f" [{numbers.setdefault(_shown(text, family), len(numbers) + 1)}]" for text in cell["findings"][:1])
    return STATES[cell["state"]] + notes


def _is_without_experts(family: dict[str, Any], column: str) -> bool:
    return column == "ep" and not family["cells"][PLAIN]["options"]["has_experts"]


def _reason(family: dict[str, Any]) -> str:
    findings = family["cells"].get(PLAIN, {}).get("findings") or ["not tried"]
    return str(findings[0])


def _shown(text: str, family: dict[str, Any]) -> str:
    """Return the first sentence of a finding as plain text, alike for families with the same one."""
    line = " ".join(text.split())
    kind = family["cells"].get(PLAIN, {}).get("options", {}).get("class")
    if kind:
        line = line.replace(kind, "the model")
    line = re.sub(r"(?<=[A-Za-z_]\.)\d+(?=\.)", "*", line)
    line = re.split(r"(?<=[a-z)'`])\. (?=[A-Z`'])", line)[0].rstrip(".").replace("<", "&lt;").replace("*", r"\*")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rpartition(' ')[0]} ..."


def main() -> None:
    """Write the page."""
    from family_models import families

    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    recorded = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    target.write_text(page(recorded, families()), encoding="utf-8")


if __name__ == "__main__":
    main()
