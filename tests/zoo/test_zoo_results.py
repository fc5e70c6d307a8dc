"""What counts as a difference in a cell of the matrix, and how the page shows cells."""

from __future__ import annotations

import pytest
import torch
from model_zoo import MATRIX
from zoo_results import Cell, page, read_cell, write_cell
from zoo_training import Plain, Reference, gradient_findings, parameter_findings, same_bits

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


def test_page_has_a_row_for_each_model_and_a_footnote_for_each_reason(tmp_path):
    write_cell(tmp_path, "b/two", "ddp", Cell(state="ok"))
    write_cell(tmp_path, "b/two", "hybrid", Cell(state="ok", options={"tp_size": 2}))
    write_cell(tmp_path, "a/one", "fsdp", Cell(state="refused", findings=["boost: ConfigError: no\nreason"]))
    write_cell(tmp_path, "a/one", "zero", Cell(state="fault", findings=["`w` differs"]))
    write_cell(tmp_path, "a/one", "hybrid", Cell(state="fault", options={"zero_stage": 1}, findings=["`w` differs"]))
    recorded = [
        {"name": name, "versions": {"torch": "2"}, "cells": read_cells(tmp_path, name)} for name in ("b/two", "a/one")
    ]
    lines = page(recorded).splitlines()
    assert lines[-7:] == [
        "| model | ddp | fsdp | zero | gemini | hybrid |",
        "|---|---|---|---|---|---|",
        "| a/one | - | refused [1] | [2] | - | [2] dp |",
        "| b/two | ok | - | - | - | ok tp |",
        "",
        "1. boost: ConfigError: no reason",
        "2. `w` differs",
    ]
    assert "2 models, 5 cells: 2 ok, 1 refused, 2 fault, 5 not measured (-)." in page(recorded)
    assert "Not measured yet (2): c/three, d/four." in page(recorded, ["d/four", "a/one", "c/three"])


def read_cells(folder, name):
    found = {plugin: read_cell(folder, name, plugin) for plugin in ("ddp", "fsdp", "zero", "hybrid")}
    return {plugin: cell.to_json() for plugin, cell in found.items() if cell is not None}
