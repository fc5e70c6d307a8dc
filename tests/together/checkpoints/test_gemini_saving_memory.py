"""Gemini saves its chunks without gathering the model."""

import torch

from booster_gemini import GeminiPlugin
from booster_testing import peak_memory, run_on_ranks


def save_and_measure(folder):
    from booster_core import Booster

    booster = Booster(plugin=GeminiPlugin(min_chunk_bytes=2**20))
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 64 MiB
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(1, 1024)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with peak_memory(maps_files=True) as used:
        booster.save_model(model, f"{folder}/m", shard=True)
        booster.save_optimizer(optimizer, f"{folder}/o", shard=True)
    return used.peak_bytes


def test_saving_gathers_nothing(tmp_path):
    # The whole model has 64 MiB, and a rank's share of model and state 96 MiB.
    assert max(run_on_ranks(save_and_measure, 2, str(tmp_path))) < 24 * 2**20
