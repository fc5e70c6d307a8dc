"""Vision-language models of transformers under every plugin: they equal one process, or are refused.

`nox -s models -- families` measures all cells and writes them to docs/families.md; the default run takes a few.
"""

import os
from pathlib import Path

import pytest
import torch
from family_cells import COLUMNS as SPLIT
from vision_cells import COLUMNS, measure_vision
from vision_models import VISION_MODELS, build_vision, vision_batch
from zoo_results import read_cell, write_cell

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_tools.verification.losses import Losses, loss_of_outputs
from booster_tools.verification.run import compare_with_one_process

RESULTS = os.environ.get("BOOSTER_FAMILIES_RESULTS")
"""The folder in which `nox -s models -- families` collects cells; those that are in it are not measured again."""
DEFAULT = {
    ("qwen3_vl", "split_gather"),
    ("qwen3_vl", "ulysses"),
    ("gemma3", "tp"),
    ("gemma3", "pp"),
    ("gemma3", "fsdp"),
}
"""The cells of the default run: features of images that are added between layers, stages, units that a rank lacks."""
ALL_EXACT = ("gemma3", "qwen3_vl")


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(name, column, id=f"{name}-{column}", marks=[] if (name, column) in DEFAULT else [pytest.mark.slow])
        for name in VISION_MODELS
        for column in COLUMNS
    ],
)
def test_vision_model_equals_one_process_or_is_refused(name, column):
    folder = Path(RESULTS or "") / "vision"
    cell = read_cell(folder, name, column) if RESULTS else None
    if cell is None:
        cell, text = measure_vision(name, column)
        if RESULTS:
            write_cell(folder, name, column, cell)
            if cell.state in ("wrong", "crash"):
                (folder / f"{name}.{column}.txt").write_text(text, encoding="utf-8")
    # Under fsdp, units differ between ranks in a step; layers of some models can't be split.
    assert cell.state in (["exact"] if name in ALL_EXACT and column != "fsdp" else ["exact", "refused", "refused late"])


def differences(column, with_images):
    batch = vision_batch("qwen3_vl", with_images, length=8)  # as many positions as a head has features

    def make():
        torch.manual_seed(20)
        model = build_vision("qwen3_vl")
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plugin = HybridParallelPlugin(**SPLIT[column], example_batch=batch)
    losses = Losses.by_criterion(loss_of_outputs)
    found = compare_with_one_process(Booster(plugin=plugin), make, losses, [batch], 1, what="verify")
    return [str(each) for each in found if not each.is_explained]


@pytest.mark.parametrize(("column", "with_images"), [("ulysses", (True, True)), ("ring", (True, False))])
def test_sequences_may_be_as_long_as_heads_are_wide(column, with_images):
    assert run_on_ranks(differences, 2, column, with_images)[0] == []
