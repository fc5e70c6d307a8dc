"""How large chunks are: what the search for a size finds, and what a budget has room for."""

import pytest
import torch

from booster_gemini.config import GeminiConfig
from booster_gemini.memory.make import most_chunk_numel
from booster_gemini.search import search_chunk_numel, wasted_numel
from booster_zero.engine import Format


def transformer(layers, hidden, vocabulary):
    """Return the sizes of a Llama's parameters, without the Llama."""
    layer = [hidden * hidden] * 4 + [hidden * hidden * 8 // 3] * 3 + [hidden] * 2
    return [vocabulary * hidden, *(layer * layers), hidden, vocabulary * hidden]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(6, 384, 8000), (12, 768, 30000), (32, 4096, 32000), (24, 1024, 50257)])
def test_the_size_found_wastes_at_most_a_twentieth(shape, world_size):
    numels = transformer(*shape)
    found = search_chunk_numel(numels, world_size, 4 * 2**20)
    assert wasted_numel(numels, world_size, found) <= 0.05 * sum(numels)


def test_the_smallest_good_size_is_taken():
    numels = [100] * 64
    assert search_chunk_numel(numels, 1, 448) == 448  # four parameters of 112 places each: nothing is left empty


def test_where_no_size_is_good_the_least_wasteful_is_taken():
    numels = [6898, 12709, 11916, 5136, 9061, 12894, 10766]
    found = search_chunk_numel(numels, 1, 9000)
    least = wasted_numel(numels, 1, found)
    assert least > 0.02 * sum(numels)
    assert all(wasted_numel(numels, 1, 9000 + 27000 * step // 192) >= least for step in range(193))


@pytest.mark.parametrize(("min_numel", "expected"), [(816, 816), (832, 832), (848, 1600)])
def test_a_size_is_good_up_to_a_fiftieth_of_waste(min_numel, expected):
    # The first of two chunks wastes 16, 32 or 48 of 1600 elements; one chunk, which ends with both, wastes none.
    assert wasted_numel([800, 800], 1, min_numel) == min_numel - 800
    assert search_chunk_numel([800, 800], 1, min_numel) == expected


def test_a_size_is_cut_to_its_fullest_chunk():
    # 1603 is the first of the sizes tried that two parameters fit into; chunks of it hold 1600 elements, and 800.
    assert search_chunk_numel([800] * 3, 1, 848) == 1600


@pytest.mark.parametrize(
    ("numels", "expected"), [([17120, 14080, 8800], 40000), ([17120, 14080, 8912], None)], ids=["four times", "more"]
)
def test_the_largest_size_tried_is_four_times_the_smallest(numels, expected):
    # These fit together alone; any smaller chunk wastes more than a fiftieth.
    assert all(wasted_numel(numels * 6, 1, size) > 0.02 * 6 * sum(numels) for size in range(10000, sum(numels), 16))
    assert wasted_numel(numels * 6, 1, sum(numels)) == 0
    found = search_chunk_numel(numels * 6, 1, 10000)
    assert found <= 40000 if expected is None else found == expected


def test_the_largest_size_comes_before_the_smallest():
    numels = [100] * 64
    assert search_chunk_numel(numels, 1, 448, 300) <= 300
    assert search_chunk_numel(numels, 1, 250, 300) <= 300


@pytest.mark.parametrize(("working", "shard_size", "state_bytes"), [
    (torch.float32, 1, 16),  # parameter, gradient, two states
    (torch.bfloat16, 1, 2 + 16),  # and an fp32 master
    (torch.float32, 2, 8 + 4),  # half of that here, and the whole parameter
])  # fmt: skip
def test_a_budget_holds_the_state_of_three_chunks(working, shard_size, state_bytes):
    format_ = Format(
        working=working,
        master=torch.float32,
        wire=working,
        device=torch.device("cpu"),
        step_device=torch.device("cpu"),
        is_trained=True,
    )
    config = GeminiConfig(placement_policy="auto", memory_budget_bytes=3 * state_bytes * 1000)
    assert most_chunk_numel(config, [format_], shard_size) == 1000
    assert most_chunk_numel(GeminiConfig(), [format_], shard_size) is None


def test_waste_is_what_chunks_cannot_fill():
    # 60 + 60 do not fit into 100; 64 is where the next parameter may begin; the last chunk ends with its parameters.
    assert wasted_numel([60, 60, 30], 1, 100) == (100 - 60) + (96 - 90)
    assert wasted_numel([320, 32], 1, 64) == 0


def test_a_model_without_parameters_wastes_nothing():
    assert wasted_numel([], 2, 100) == 0
    assert search_chunk_numel([], 2, 100) == 100
