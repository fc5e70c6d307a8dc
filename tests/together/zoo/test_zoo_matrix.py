"""Every model of the zoo under every plugin equals one process: gradients, steps, checkpoints, lazy construction.

`nox -s models -- zoo` runs all cells and writes docs/compatibility.md; the default run takes some models, each under
one plugin.
"""

import os
from pathlib import Path

import pytest
from isolated_libraries import FOLDER, missing_libraries
from matrix import matrix
from model_zoo import MATRIX
from zoo_cells import measure
from zoo_results import COLUMNS, read_cell, write_cell

RESULTS = os.environ.get("BOOSTER_ZOO_RESULTS")
"""The folder in which `nox -s models -- zoo` collects cells; those that are in it are not measured again."""


@matrix(
    [
        "transformers/gpt2_lm-zero",
        "transformers/gpt2_double_heads-zero",
        "transformers/albert-zero",
        "transformers/vit_classification-ddp",
        "timm/convit_base-zero",
        "torchrec/dlrm-zero",
        "own/complex_parameter-gemini",
        "own/integer_parameter-zero",
        "own/transposed_parameter-zero",
        "own/weight_norm_hook-ddp",
        "own/gru-ddp",
        "own/renormalized_embedding-fsdp",
        "own/hooked_accumulation-fsdp",
        "own/batch_norm-ddp",
    ],
    name=MATRIX,
    plugin=COLUMNS,
)
def test_training_and_checkpoints_equal_one_process(name, plugin, tmp_path, ranks_with_isolated_libraries):
    model = MATRIX[name]
    if missing := missing_libraries(model.needs):
        pytest.skip(f"{', '.join(missing)} not installed, neither in the environment nor in {FOLDER}")
    cell = read_cell(Path(RESULTS), name, plugin) if RESULTS else None
    if cell is None:
        cell = measure(name, plugin, tmp_path)
        if RESULTS:
            write_cell(Path(RESULTS), name, plugin, cell)
    expected = "refused" if plugin in model.refused else "ok"
    assert cell.state == expected, cell.findings
