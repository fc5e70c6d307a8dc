"""Every model of the zoo under every plugin equals one process: gradients, steps, checkpoints, lazy construction.

`nox -s zoo` runs all cells and writes docs/compatibility.md; the default run takes some models, each under one plugin.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from isolated_libraries import FOLDER, missing_libraries
from model_zoo import MATRIX
from zoo_cells import COLUMNS, Cell, measure, measure_plain
from zoo_results import read_cell, write_cell

HARD = (
    "timm/convit_base",
    "timm/convit_tiny",
    "torchrec/dlrm",
    "torchrec/deepfm",
    "diffusers/vq_model",
    "transformers/albert",
    "transformers/albert_pretraining",
    "transformers/bert",
    "transformers/bert_pretraining",
    "transformers/gpt2_double_heads",
)
"""Models that Colossal-AI excludes from its low-level ZeRO tests: repeated layers, odd inputs, unused parameters."""
RESULTS = os.environ.get("BOOSTER_ZOO_RESULTS")
"""The folder in which `nox -s zoo` collects cells; those that are in it are not measured again."""


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory, new_interpreters):
    """Return a function that trains a model in one process, once for all plugins; it returns its folder and errors."""
    known: dict[str, tuple[Path, list[str]]] = {}

    def train(name: str) -> tuple[Path, list[str]]:
        if name not in known:
            while known:  # cells are in the order of models
                shutil.rmtree(known.popitem()[1][0])
            home = tmp_path_factory.mktemp("model")
            known[name] = home, measure_plain(name, home)
        return known[name]

    return train


def _cases() -> list[Any]:
    """Return all pairs of models and plugins."""
    return [
        pytest.param(name, plugin, id=f"{name}-{plugin}", marks=_marks(name, plugin))
        for name in MATRIX
        for plugin in (*COLUMNS, *(["zero-1"] if name in HARD else []))
    ]


def _marks(name: str, plugin: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a pair: by default, hard models train under both ZeRO stages, others under some plugin."""
    if MATRIX[name].slow:
        return [pytest.mark.slow]
    if name in HARD:
        return [] if plugin in {"zero", "zero-1"} else [pytest.mark.slow]
    return [pytest.mark.covering(1)]


@pytest.mark.parametrize(("name", "plugin"), _cases())
def test_training_and_checkpoints_equal_one_process(name, plugin, plain_runs):
    model = MATRIX[name]
    if missing := missing_libraries(model.needs):
        pytest.skip(f"{', '.join(missing)} not installed, neither in the environment nor in {FOLDER}")
    cell = read_cell(Path(RESULTS), name, plugin) if RESULTS else None
    if cell is None:
        home, errors = plain_runs(name)
        cell = Cell(state="fault", findings=errors) if errors else measure(name, plugin, home)
        if RESULTS:
            write_cell(Path(RESULTS), name, plugin, cell)
    expected = "refused" if plugin in model.refused else "ok"
    assert cell.state == expected, cell.findings


@pytest.mark.parametrize("name", HARD)
def test_default_run_includes_the_hard_models(name):
    assert not MATRIX[name].slow


def test_matrix_has_at_least_150_models():
    assert len(MATRIX) >= 150


def test_refusals_name_plugins_of_the_page():
    assert {plugin for model in MATRIX.values() for plugin in model.refused} <= set(COLUMNS)
