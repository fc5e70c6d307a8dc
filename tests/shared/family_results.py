"""The recorded cells of the table of families: a CSV file with every cell, and the page with totals.

``python tests/shared/family_results.py RESULTS docs`` writes ``docs/tables/families.csv`` and the page;
``python tests/shared/family_results.py docs`` writes the page again.
"""

import re
import sys
from collections import Counter
from pathlib import Path

from zoo_results import read, read_table, write_table

COLUMNS = ("tp", "pp", "split_gather", "ulysses", "ring", "ep")
VISION_COLUMNS = ("ddp", "fsdp", "zero", "gemini", "tp", "pp", "split_gather", "ulysses")
PLAIN = "plain"
"""The cell of one process: whether the model can be trained at all, and facts about it."""
NO_EXPERTS = "-"
STATES = {
    "exact": "exact",
    "refused": "refused",
    "refused late": "refused in the first step",
    "wrong": "**WRONG**",
    "crash": "**crash**",
}
"""How the page shows the state of a cell."""
_LONGEST = 240
_HEAD = """# Families: which transformers models can be split, and how

Tiny models with random weights of every family of transformers with a causal language model, split by the hybrid plugin
over two ranks (gloo, fp32, CPU). `nox -s models -- families` measures them: **[all cells, with the reason of each
that is refused](tables/families.csv)**.

- **exact**: outputs, losses, each gradient and the parameters after a step equal those of one process, as compared by
  `booster_tools.verify`: within 1e-4 of each tensor's norm in fp32, or else 1e-5 in fp64.
- **refused**: `boost` raises a `ConfigError` on every rank and names the reason; nothing was trained.
- **WRONG** and **crash** are faults: another result than that of one process, and any other error.

`tp`, `pp` and `ep` have that size 2, `pp` with two microbatches; `split_gather` has `tp_size=2`, and `ulysses`
(`"all_to_all"`) and `ring` (`"ring_attn"`) have `sp_size=2`. `boost` is given a batch.
"""

_VISION = """## Vision-language models

Tiny models that read images, each trained on batches with images, of text alone, and of both: then one data parallel
rank has images and the other has none, or one microbatch of a pipeline. The language model is split; the tower of the
images stays whole, unless transformers' plan splits it, too. `boost` is given an `example_batch` with images, as a
pipeline needs it where any batch has some, and a pipeline whose images are rows of patches a
[`split_batch`](plugins/hybrid.md). **[All cells, with reasons](tables/vision.csv)**: under fsdp, ranks with images and
without would run different units, which is refused in the step.
"""


def table(recorded):
    """Return a row of text for each family, in the order of their names, from the contents of the files."""
    rows = []
    for each in sorted(recorded, key=lambda each: str(each["name"])):
        plain = each["cells"][PLAIN]
        row = dict.fromkeys(("family", "policy", *COLUMNS), "")
        row |= {"family": each["name"], PLAIN: _text(plain, each)}
        if plain["state"] == "ok":
            row |= {"policy": plain["options"]["policy"], **{column: _cell(each, column) for column in COLUMNS}}
        row["versions"] = ", ".join(f"{name} {each['versions'][name]}" for name in ("torch", "transformers"))
        rows.append(row)
    return rows


def vision_table(recorded):
    """Return a row of text for each vision-language model, in the order of their names."""
    return [
        {"model": each["name"], **{column: _cell(each, column) for column in VISION_COLUMNS if column in each["cells"]}}
        for each in sorted(recorded, key=lambda each: str(each["name"]))
    ]


def vision_part(rows):
    """Return the part of the page about vision-language models."""
    lines = [f"| | {' | '.join(VISION_COLUMNS)} |", "|---" * (len(VISION_COLUMNS) + 1) + "|"]
    for row in rows:
        states = (STATES[row[column].partition(":")[0]] for column in VISION_COLUMNS)
        lines.append(f"| {row['model']} | {' | '.join(states)} |")
    return "\n".join([_VISION, *lines, ""])


def page(rows):
    """Return the page of a table: how many cells have which state, and why cells are refused."""
    measured = [row for row in rows if row[PLAIN] == "ok"]
    others = [row for row in rows if row[PLAIN] != "ok"]
    versions = max(row["versions"] for row in measured)
    parts = [_HEAD, f"Measured with {versions}: {len(measured)} families.\n", _totals(measured)]
    policies = Counter(row["policy"] for row in measured)
    counted = [f"{policies[name]} families by {words}" for name, words in _POLICIES.items() if policies[name]]
    parts.append(f"Layers are split {', '.join(counted)}; {_WITHOUT.format(policies['none'])}\n")
    faults = [
        f"- {row['family']}, {column}: {row[column]}"
        for row in measured
        for column in COLUMNS
        if row[column].partition(":")[0] in ("wrong", "crash", "refused late")
    ]
    if faults:
        parts += ["## Faults\n", "\n".join(faults) + "\n"]
    if others:
        listed = "\n".join(f"- {row['family']}: {row[PLAIN].partition(': ')[2]}" for row in others)
        parts.append(f"Not measured ({len(others)}), because the tiny model could not be trained in one process:\n")
        parts.append(f"{listed}\n")
    return "\n".join(parts)


_POLICIES = {"transformers": "transformers' own plan", "ours": "a policy of ours"}
_WITHOUT = "{} families have neither, and are refused unless you [write a policy](sharding-policies.md)."


def _totals(rows):
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for state, shown in STATES.items():
        counts = [sum(row[column].partition(":")[0] == state for row in rows) for column in COLUMNS]
        if state in ("exact", "refused", "wrong") or any(counts):
            lines.append(f"| {shown} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def _cell(family, column):
    """Return the text of a cell."""
    cell = family["cells"].get(column)
    if cell is not None:
        return _text(cell, family)
    is_without = column == "ep" and not family["cells"][PLAIN]["options"]["has_experts"]
    return NO_EXPERTS if is_without else ""


def _text(cell, family):
    return f"{cell['state']}: {_shown(cell['findings'][0], family)}" if cell["findings"] else str(cell["state"])


def _shown(text, family):
    """Return the first sentence of a finding as plain text, alike for families with the same one."""
    line = " ".join(text.split())
    kind = family["cells"].get(PLAIN, {}).get("options", {}).get("class")
    if kind:
        line = line.replace(kind, "the model")
    line = re.sub(r"(?<=[A-Za-z_]\.)\d+(?=\.)", "*", line)
    line = re.split(r"(?<=[a-z)'`])\. (?=[A-Z`'])", line)[0].rstrip(".")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rpartition(' ')[0]} ..."


def whole_page(tables):
    """Return the page of all tables in a folder."""
    parts = page(read_table(tables / "families.csv")), vision_part(read_table(tables / "vision.csv"))
    return "\n".join(parts)


def main():
    """Write the table where results are given, and the page."""
    *results, docs = map(Path, sys.argv[1:])
    path = docs / "tables" / "families.csv"
    if results:
        families, of_vision = ([*map(read, each.glob("*.json"))] for each in (results[0], results[0] / "vision"))
        write_table(table(families), path)
        write_table(vision_table(of_vision), path.with_name("vision.csv"))
    (docs / "families.md").write_text(whole_page(docs / "tables"), encoding="utf-8")


if __name__ == "__main__":
    main()
