"""How the page of families shows their cells."""

from __future__ import annotations

from pathlib import Path

from family_results import COLUMNS, VISION_COLUMNS, page, table, vision_part, vision_table, whole_page


def family(name, *, has_experts=False, policy="none", **states):
    facts = {"class": f"{name.title()}ForCausalLM", "policy": policy, "has_experts": has_experts}
    cells = {
        column: {"state": state, "options": {}, "findings": findings} for column, (state, findings) in states.items()
    }
    return {
        "name": name,
        "versions": {"torch": "2", "transformers": "5"},
        "cells": {"plain": {"state": "ok", "options": facts, "findings": []}, **cells},
    }


def test_a_table_has_each_cell_and_its_page_counts_them_and_their_reasons():
    exact = dict.fromkeys(COLUMNS, ("exact", []))
    reason = "There is no sharding policy for {}ForCausalLM. Pass `custom_policy=`."
    refused = [
        family(name, **dict.fromkeys(COLUMNS[:5], ("refused", [reason.format(name.title())]))) for name in ("b", "c")
    ]
    broken = family(
        "d", policy="ours", tp=("wrong", ["gradient 'x.0.weight' at step 1"]), ring=("refused late", ["no"])
    )
    unbuilt = {
        "name": "e",
        "versions": {},
        "cells": {"plain": {"state": "not measured", "options": {}, "findings": ["x"]}},
    }
    rows = table([*refused, broken, family("a", has_experts=True, policy="transformers", **exact), unbuilt], ["a", "f"])
    found = {row["family"]: row for row in rows}
    assert list(found) == ["a", "b", "c", "d", "e", "f"]
    assert [found["a"][column] for column in COLUMNS] == ["exact"] * 6
    assert found["b"]["tp"] == found["c"]["tp"] == "refused: There is no sharding policy for the model"
    assert (found["b"]["ep"], found["d"]["pp"], found["d"]["policy"]) == ("-", "", "ours")
    assert found["d"]["tp"] == "wrong: gradient 'x.*.weight' at step 1"
    text = page(rows)
    lines = text.splitlines()
    assert "| exact | 1 | 1 | 1 | 1 | 1 | 1 |" in lines
    assert "| refused | 2 | 2 | 2 | 2 | 2 | 0 |" in lines
    assert "| refused in the first step | 0 | 0 | 0 | 0 | 1 | 0 |" in lines
    assert "| **WRONG** | 1 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "| not measured yet | 0 | 1 | 1 | 1 | 0 | 0 |" in lines
    assert "- d, tp: wrong: gradient 'x.*.weight' at step 1" in lines
    assert "- d, ring: refused late: no" in lines
    kind = "no tensor plan of transformers and no policy of ours"
    assert f"| {kind} | 2 tp, 2 pp, 2 split_gather, 2 ulysses, 2 ring |" in lines
    assert "- e: x" in lines
    assert "Not measured yet (1): f." in lines


def test_the_documented_page_is_made_of_its_table():
    docs = Path(__file__).parents[3] / "docs"
    assert (docs / "families.md").read_text(encoding="utf-8") == whole_page(docs / "tables")


def test_the_part_about_images_has_a_row_for_each_model_and_says_why_cells_are_refused():
    late = ("refused late", ["on batches of both: Ranks run different units of the model: rank 0 runs 'a'."])
    recorded = [
        family(name, fsdp=late, **dict.fromkeys(set(VISION_COLUMNS) - {"fsdp"}, ("exact", []))) for name in ("b", "a")
    ]
    lines = vision_part(vision_table(recorded)).splitlines()
    shown = ["exact", "refused in the first step", *["exact"] * 6]
    assert f"| a | {' | '.join(shown)} |" in lines
    assert lines.index(f"| b | {' | '.join(shown)} |") == lines.index(f"| a | {' | '.join(shown)} |") + 1
    (reason,) = [line for line in lines if line.startswith("- ")]
    assert reason.startswith("- fsdp, all: where one rank has images and another has none, ranks would run different")
