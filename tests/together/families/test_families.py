"""Every family of transformers with a causal language model under hybrid: it equals one process, or is refused.

`nox -s models -- families` measures all cells and writes docs/families.md; the default run takes a few families.
"""

import functools
import os
from pathlib import Path

import pytest
from family_cells import COLUMNS, measure, measure_plain
from family_models import families
from family_results import PLAIN
from zoo_results import cell_of

RESULTS = Path(os.environ["BOOSTER_FAMILIES_RESULTS"]) if "BOOSTER_FAMILIES_RESULTS" in os.environ else None
"""The folder in which `nox -s models -- families` collects cells; those that are in it are not measured again."""
DEFAULT = {"olmo2": ("tp",), "qwen3_moe": COLUMNS}
"""Families and columns of the default run: norms over all heads, and experts."""


@functools.cache
def plain_cell(name):
    """Train a family's model in one process, once for all columns."""
    return cell_of(RESULTS, name, PLAIN, measure_plain)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(
            name, column, id=f"{name}-{column}", marks=[] if column in DEFAULT.get(name, ()) else [pytest.mark.slow]
        )
        for name in families()
        for column in COLUMNS
    ],
)
def test_family_equals_one_process_or_is_refused(name, column):
    plain = plain_cell(name)
    if plain.state != "ok":
        pytest.skip(f"the tiny model can't be trained in one process: {plain.findings[0]}")
    if column == "ep" and not plain.options["has_experts"]:
        pytest.skip("has no experts")
    cell = cell_of(RESULTS, name, column, measure)
    assert cell.state in (["exact"] if name in DEFAULT else ["exact", "refused", "refused late"]), cell.findings
