"""Vision-language models of transformers under every plugin: they equal one process, or are refused.

`nox -s models -- families` measures all cells and writes them to docs/families.md; the default run takes a few.
"""

import os
from functools import partial
from pathlib import Path

import pytest
from family_cells import COLUMNS as SPLIT
from ranked import on_ranks
from vision_cells import BATCHES, COLUMNS, differences, measure_vision
from vision_models import VISION_MODELS, vision_batch
from zoo_results import cell_of

from booster_hybrid import HybridParallelPlugin

RESULTS = Path(os.environ["BOOSTER_FAMILIES_RESULTS"], "vision") if "BOOSTER_FAMILIES_RESULTS" in os.environ else None
"""The folder in which `nox -s models -- families` collects cells; those that are in it are not measured again."""
DEFAULT = {
    ("qwen3_vl", "split_gather"),
    ("qwen3_vl", "ulysses"),
    ("gemma3", "tp"),
    ("gemma3", "pp"),
    ("gemma3", "fsdp"),
}
"""The cells of the default run: features of images that are added between layers, stages, units that a rank lacks."""
QUICK = {("gemma3", "pp"): ("both",)}
"""Kinds of batches where these are not all; other models have all of them each night."""
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
    kinds = BATCHES if RESULTS else QUICK.get((name, column), BATCHES)
    cell = cell_of(RESULTS, name, column, partial(measure_vision, kinds=kinds))
    # Under fsdp, units differ between ranks in a step; layers of some models can't be split.
    assert cell.state in (["exact"] if name in ALL_EXACT and column != "fsdp" else ["exact", "refused", "refused late"])


@pytest.mark.parametrize(("column", "with_images"), [("ulysses", (True, True)), ("ring", (True, False))])
@on_ranks(2)
def test_sequences_may_be_as_long_as_heads_are_wide(column, with_images):
    batch = vision_batch("qwen3_vl", with_images, length=8)  # as many positions as a head has features
    assert differences("qwen3_vl", HybridParallelPlugin(**SPLIT[column], example_batch=batch), [batch]) == []
