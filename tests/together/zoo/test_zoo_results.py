"""What counts as a difference in a cell of the matrix, and how the page shows cells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_zoo import MATRIX
from zoo_compare import gradient_findings, parameter_findings, same_bits
from zoo_results import Cell, page, read_cell, read_table, table, write_cell, write_table
from zoo_training import Plain, Reference

ZOO = MATRIX["own/frozen_inside"]


def make_reference(rounding=1e-7):
    """Return a reference of three steps with a gradient that has no effect; rounded relative to fp64."""
    exact = {"weight": torch.arange(1.0, 5.0).double(), "no_effect": torch.zeros(2).double()}
    plain = {"weight": (exact["weight"] * (1 + rounding)).float(), "no_effect": torch.full((2,), 1e-8)}
    both = [Plain([each] * 4, [each] * 2) for each in (plain, exact)]
    return Reference(*both, state={}, dtype=torch.float32)


def ours(**changes):
    plain = make_reference().plain.gradients[0]
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("changes", "rounding"),
    [
        ({}, 1e-7),
        ({"weight": torch.arange(1.0, 5.0) * (1 + 5e-6)}, 1e-7),
        ({"weight": torch.arange(1.0, 5.0) * (1 + 3e-4)}, 1e-4),
        ({"no_effect": torch.full((2,), -1e-7)}, 1e-7),
    ],
)
def test_rounding_is_no_finding(changes, rounding):
    assert gradient_findings(ours(**changes), make_reference(rounding), 0, ZOO) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight": torch.arange(1.0, 5.0) * 1.0001}, "gradient of step 2: `weight` differs by 1.0e-04"),
        ({"weight": torch.arange(1.0, 5.0) * 2}, "`weight` differs by 1.0e+00 of its largest value (1 of 2 do)"),
        ({"weight": torch.tensor([1.0, 2.0, 3.0, float("nan")])}, "`weight` differs by inf"),
        ({"weight": torch.arange(1.0, 4.0)}, "shape of `weight` is (3,), not (4,)"),
        ({"no_effect": torch.full((2,), 1e-4)}, "`no_effect` differs by"),
        ({"other": torch.zeros(1)}, "other names, other"),
    ],
)
def test_wrong_gradient_is_a_finding(changes, text):
    (finding,) = gradient_findings(ours(**changes), make_reference(), 1, ZOO)
    assert text in finding


def test_wrong_parameter_is_a_finding():
    (finding,) = parameter_findings(ours(weight=torch.arange(2.0, 6.0)), make_reference(), 1, ZOO)
    assert finding.startswith("after step 4: `weight` differs by 2.5e-01")


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (torch.tensor([1.0, 2.0, float("nan")]), None),
        (torch.tensor([1.0, 2.0000002, float("nan")]), "`a` differs by"),
        (torch.tensor([1.0, 2.0, float("nan")]).double(), "`a` is torch.float32"),
        ({"num_calls": 3}, "`a` is"),
    ],
)
def test_same_bits(theirs, text):
    found = same_bits({"a": torch.tensor([1.0, 2.0, float("nan")])}, {"a": theirs})
    assert found == [] if text is None else text in found[0]


def test_a_table_has_each_cell_and_its_page_has_totals_faults_and_reasons(tmp_path):
    write_cell(tmp_path, "b/two", "ddp", Cell(state="ok"))
    write_cell(tmp_path, "b/two", "hybrid", Cell(state="ok", options={"tp_size": 2}))
    write_cell(tmp_path, "a/one", "fsdp", Cell(state="refused", findings=["boost: ConfigError: no\nreason"]))
    write_cell(tmp_path, "a/one", "zero", Cell(state="fault", findings=["`w` differs"]))
    write_cell(tmp_path, "a/one", "hybrid", Cell(state="fault", options={"zero_stage": 1}, findings=["`w` differs"]))
    recorded = [
        {"name": name, "versions": {"torch": "2"}, "cells": read_cells(tmp_path, name)} for name in ("b/two", "a/one")
    ]
    rows = table(recorded, ["d/four", "a/one", "c/three"])
    write_table(rows, tmp_path / "cells.csv")
    assert read_table(tmp_path / "cells.csv") == rows
    one, two, three, _ = rows
    assert one["fsdp"] == "refused: boost: ConfigError: no reason"
    assert (one["ddp"], one["hybrid"], one["mesh of hybrid"]) == ("", "fault: `w` differs", "dp")
    assert (two["ddp"], two["hybrid"], two["mesh of hybrid"], two["versions"]) == ("ok", "ok", "tp", "torch 2")
    assert set(three.values()) == {"c/three", ""}
    text = page(rows)
    assert "2 models, 5 cells: 2 ok, 1 refused, 2 fault, 5 not measured." in text
    assert "## Faults\n\n- a/one, zero: fault: `w` differs\n- a/one, hybrid: fault: `w` differs\n" in text
    assert "| a/one | fsdp | boost: ConfigError: no reason |" in text
    assert "Not measured yet (2): c/three, d/four." in text


def test_the_documented_page_is_made_of_its_table():
    docs = Path(__file__).parents[3] / "docs"
    rows = read_table(docs / "tables" / "compatibility.csv")
    assert (docs / "compatibility.md").read_text(encoding="utf-8") == page(rows)
    assert {row["model"] for row in rows} == set(MATRIX)


def read_cells(folder, name):
    found = {plugin: read_cell(folder, name, plugin) for plugin in ("ddp", "fsdp", "zero", "hybrid")}
    return {plugin: cell.to_json() for plugin, cell in found.items() if cell is not None}
