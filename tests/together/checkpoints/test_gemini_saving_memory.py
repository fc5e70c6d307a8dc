"""Gemini saves its chunks without gathering the model."""

import torch
from ranked import on_ranks

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_testing import peak_memory


@on_ranks(2)
def test_saving_gathers_nothing(tmp_path):
    booster = Booster(plugin=GeminiPlugin(min_chunk_bytes=2**20))
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(1, 1024)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with peak_memory(maps_files=True) as used:
        booster.save_model(model, tmp_path / "m", shard=True)
        booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
    # The whole model has 64 MiB, and a rank's share of model and state 96 MiB.
    assert used.peak_bytes < 24 * 2**20
