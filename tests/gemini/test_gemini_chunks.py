"""How large chunks are, and how many come ahead: what a budget has room for."""

import pytest
import torch

from booster_gemini.config import GeminiConfig
from booster_gemini.engine import max_ahead_bytes, most_chunk_numel
from booster_zero.engine import Format


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


def test_a_quarter_of_a_budget_comes_ahead():
    assert max_ahead_bytes(GeminiConfig(placement_policy="auto", memory_budget_bytes=1000)) == 250
    assert max_ahead_bytes(GeminiConfig()) is None
