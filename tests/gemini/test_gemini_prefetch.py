"""How many chunks are gathered ahead of their use: as a budget has room for."""

import torch

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_gemini.engine import max_ahead_bytes
from booster_testing import run_on_ranks
from booster_zero.engine import Bucket

LAYERS, WIDTH = 8, 64
LAYER_BYTES = WIDTH * WIDTH * 4


def most_ahead(folder, budget):
    """Train, and return the most chunks and bytes that were underway at once, and the peak of the budget."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    plugin = GeminiPlugin(
        min_chunk_bytes=LAYER_BYTES,
        max_prefetch=100,
        placement_policy="auto",
        memory_budget_bytes=budget,
        offload_dir=folder,
    )
    model, optimizer, *_ = Booster("cpu", plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    gatherer = model.gatherer
    seen = [(0, 0)]
    start = Bucket.start_gather

    def counted(chunk):
        start(chunk)
        seen.append((len(gatherer._ahead), sum(each.whole_bytes for each in gatherer._ahead.values())))

    Bucket.start_gather = counted
    try:
        for _ in range(3):
            optimizer.backward(model(torch.ones(2, WIDTH)).sum())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Bucket.start_gather = start
    peak = gatherer.memory.top.peak_bytes
    return max(count for count, _ in seen), max(size for _, size in seen), peak


def test_a_budget_bounds_what_is_underway(tmp_path):
    budget = 16 * LAYERS * WIDTH * WIDTH // 2 // 2  # half of what a rank has
    quarter = max_ahead_bytes(GeminiPlugin(placement_policy="auto", memory_budget_bytes=budget).config)
    assert quarter < 4 * LAYER_BYTES
    for count, size, peak in run_on_ranks(most_ahead, 2, str(tmp_path), budget):
        assert count >= 1
        assert 0 < size <= quarter
        assert peak <= budget
