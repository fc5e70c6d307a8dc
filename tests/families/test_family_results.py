"""How the page of families shows their cells."""

from __future__ import annotations

from family_results import COLUMNS, page


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


def test_page_counts_cells_and_numbers_reasons():
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
    text = page([*refused, broken, family("a", has_experts=True, policy="transformers", **exact), unbuilt], ["a", "f"])
    lines = text.splitlines()
    assert "| exact | 1 | 1 | 1 | 1 | 1 | 1 |" in lines
    assert "| refused | 2 | 2 | 2 | 2 | 2 | 0 |" in lines
    assert "| refused in the first step | 0 | 0 | 0 | 0 | 1 | 0 |" in lines
    assert "| **WRONG** | 1 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "| not measured yet | 0 | 1 | 1 | 1 | 0 | 0 |" in lines
    assert "| a | exact | exact | exact | exact | exact | exact | transformers |" in lines
    assert "| b | refused [1] | refused [1] | refused [1] | refused [1] | refused [1] | - | none |" in lines
    assert "| d | **WRONG** [2] | not yet | not yet | not yet | refused in the first step [3] | - | ours |" in lines
    assert "- e: x" in lines
    assert "Not measured yet (1): f." in lines
    assert lines[-3:] == [
        "1. There is no sharding policy for the model",
        r"2. gradient 'x.\*.weight' at step 1",
        "3. no",
    ]
