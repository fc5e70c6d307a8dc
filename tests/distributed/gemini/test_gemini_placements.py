"""Wherever chunks lie, training gives the same bits."""

import pytest
import torch
import torch.distributed as dist

from booster_core import Booster
from booster_core.testing import run_on_ranks
from booster_core.testing.models import tiny_llama
from booster_gemini import GeminiPlugin

MODEL = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 3}
OPTIONS = {
    "static halves": {"offload_param_frac": 0.5, "offload_optim_frac": 0.5},
    "everything on disk": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "auto": {"placement_policy": "auto", "memory_budget_bytes": 1_400_000},
}


def train(precision, options, steps=4):
    """Return losses, norms and whole parameters."""
    booster = Booster("cpu", precision, GeminiPlugin(min_chunk_bytes=40_000, **options))
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
    state = model.state_dict()
    close = getattr(model.manager.home, "close", None)
    if close is not None:
        close()
    return seen, state


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_bits_do_not_depend_on_the_placement(name, precision, world_size, tmp_path):
    still = run_on_ranks(train, world_size, precision, {})
    moved = run_on_ranks(train, world_size, precision, {**OPTIONS[name], "offload_dir": str(tmp_path)})
    for (seen, state), (expected_seen, expected) in zip(moved, still, strict=True):
        assert seen == expected_seen
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())
