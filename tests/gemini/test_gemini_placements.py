"""Within a budget, training gives the same bits, and so it does by closures."""

import torch
import torch.distributed as dist
from matrix import matrix

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

MODEL = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 3}


def train(precision, options, steps=4, min_chunk_bytes=40_000):
    """Return losses, norms and whole parameters."""
    booster = Booster("cpu", precision, GeminiPlugin(min_chunk_bytes=min_chunk_bytes, **options))
    torch.manual_seed(0)
    model = tiny_llama(**MODEL)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (2 * size, 8), generator=generator)[rank::size].contiguous()
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        seen.append((loss.item(), float(optimizer.clip_grad_by_norm(0.5))))
        optimizer.step()
        optimizer.zero_grad()
    memory = model.gatherer.memory
    peak = memory.top.peak_bytes if memory.moves else 0  # of the steps: whole parameters take what they take
    state = model.state_dict()
    return seen, state, peak


@matrix(["None-1"], precision=[None, "bf16"], world_size=[1, 2])
def test_a_third_of_the_state_is_enough(precision, world_size, tmp_path):
    state_bytes = 16 if precision is None else 18
    numel = sum(parameter.numel() for parameter in tiny_llama(**MODEL).parameters())
    budget = numel * state_bytes // 3 // world_size
    options = {"placement_policy": "auto", "memory_budget_bytes": budget, "offload_dir": str(tmp_path)}
    still = run_on_ranks(train, world_size, precision, {})
    moved = run_on_ranks(train, world_size, precision, options)  # in smaller chunks, as the budget asks
    for (seen, state, peak), (expected_seen, expected, _) in zip(moved, still, strict=True):
        assert peak <= budget
        assert seen == expected_seen
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


def test_chunks_are_as_small_as_a_small_budget_asks(tmp_path):
    budget = sum(parameter.numel() for parameter in tiny_llama(**MODEL).parameters()) * 18 // 3 // 2
    options = {"placement_policy": "auto", "memory_budget_bytes": budget, "offload_dir": str(tmp_path)}
    for seen, _, peak in run_on_ranks(train, 2, "bf16", options, min_chunk_bytes=16 * 2**20):
        assert seen[-1][0] < seen[0][0]
        assert peak <= budget
