"""Chunks of every transformer in the zoo waste at most a twentieth, at the sizes that the search finds.

The models are tiny: one of their two dozen parameters may be a quarter of all. So the smallest chunk is large as well.
"""

import importlib.util

import pytest
import torch
from model_zoo import ZOO, get_model

from booster_gemini.search import search_chunk_numel, wasted_numel

NAMES = [name for name, model in ZOO.items() if name.startswith("transformers/") and not model.slow]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the models are transformers'")
@pytest.mark.parametrize("name", NAMES)
def test_chunks_waste_at_most_a_twentieth(name):
    torch.manual_seed(0)
    numels = [parameter.numel() for parameter in get_model(name).build().parameters()]
    for world_size in (1, 2, 8):
        found = search_chunk_numel(numels, world_size, max(sum(numels) // 6, 1))
        assert wasted_numel(numels, world_size, found) <= 0.05 * sum(numels), world_size
