"""``BOOSTER_DEBUG=collectives`` changes no result of a training."""

import os

import pytest
import torch
import torch.distributed as dist
from noted_calls import difference_of_calls

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime.collectives.call_sites import NOTES
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin


def trains(plugin_name):
    """Train three steps under a strategy; return what the model then computes."""
    plugins = {
        "zero": lambda: LowLevelZeroPlugin(stage=1, overlap_allgather=True, bucket_bytes=5000),
        "gemini": GeminiPlugin,
        "hybrid": lambda: HybridParallelPlugin(tp_size=1, zero_stage=2),
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    booster = Booster(plugin=plugins[plugin_name]())
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(3):
        booster.backward(boosted(torch.full((2, 32), step + dist.get_rank() + 1.0)).square().mean(), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert (NOTES.last is not None) == ("BOOSTER_DEBUG" in os.environ)
    result = boosted(torch.ones(1, 32)).sum().item()
    assert difference_of_calls() is None
    return result


@pytest.mark.parametrize("plugin_name", ["zero", "gemini", "hybrid"])
def test_strategies_train_as_without_notes_and_their_calls_agree(monkeypatch, plugin_name):
    monkeypatch.setenv("BOOSTER_DEBUG", "collectives")
    noted = run_on_ranks(trains, 2, plugin_name)
    monkeypatch.delenv("BOOSTER_DEBUG")
    assert noted == run_on_ranks(trains, 2, plugin_name)
