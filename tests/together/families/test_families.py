"""Every family of transformers with a causal language model under hybrid: it equals one process, or is refused.

`nox -s models -- families` measures all cells and writes docs/families.md; the default run takes a few families.
"""

import os
from pathlib import Path

import pytest
from family_cells import COLUMNS, measure, measure_plain
from family_models import NOT_MEASURED, families
from family_results import PLAIN
from zoo_results import Cell, read_cell, write_cell

RESULTS = os.environ.get("BOOSTER_FAMILIES_RESULTS")
"""The folder in which `nox -s models -- families` collects cells; those that are in it are not measured again."""
DEFAULT = {"olmo2": ("tp",), "qwen3_moe": COLUMNS}
"""Families and columns of the default run: norms over all heads, and experts."""


@pytest.fixture(scope="module")
def plain_cells():
    """Return a function that trains a family's model in one process, once for all columns."""
    known = {}

    def train(name):
        if name not in known:
            known[name] = _recorded(name, PLAIN) or _plain(name)
            _record(name, PLAIN, known[name])
        return known[name]

    return train


def _plain(name):
    if name in NOT_MEASURED:
        return Cell(state="not measured", findings=[NOT_MEASURED[name]])
    return measure_plain(name)


def _recorded(name, column):
    return read_cell(Path(RESULTS), name, column) if RESULTS else None


def _record(name, column, cell):
    if RESULTS:
        write_cell(Path(RESULTS), name, column, cell)


def _cases():
    return [
        pytest.param(
            name, column, id=f"{name}-{column}", marks=[] if column in DEFAULT.get(name, ()) else [pytest.mark.slow]
        )
        for name in families()
        for column in COLUMNS
    ]


@pytest.mark.parametrize(("name", "column"), _cases())
def test_family_equals_one_process_or_is_refused(name, column, plain_cells):
    plain = plain_cells(name)
    if plain.state != "ok":
        pytest.skip(f"the tiny model can't be trained in one process: {plain.findings[0]}")
    if column == "ep" and not plain.options["has_experts"]:
        pytest.skip("has no experts")
    cell = _recorded(name, column)
    if cell is None:
        cell, text = measure(name, column)
        _record(name, column, cell)
        if RESULTS and cell.state in ("wrong", "crash"):
            (Path(RESULTS) / f"{name}.{column}.txt").write_text(text, encoding="utf-8")
    assert cell.state in (["exact"] if name in DEFAULT else ["exact", "refused", "refused late"]), cell.findings
