"""An average made before the first step is that of the masters, whatever splits them."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import booster_runtime
from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

DECAY, STEPS = 0.75, 3


def train(folder, options):
    torch.manual_seed(0)
    net = tiny_llama()
    booster = Booster("cpu", "bf16", HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    ema = booster_runtime.ema(booster, model, DECAY)
    booster.save_model(model, f"{folder}/model-0.safetensors")
    for step in range(STEPS):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        booster.save_model(model, f"{folder}/model-{step + 1}.safetensors")
    ema.save(f"{folder}/ema.safetensors")
    dist.barrier()


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {"zero_stage": 3}), (4, {"tp_size": 2, "zero_stage": 1})],
    ids=["stage 3", "split tensors"],
)
def test_an_average_made_before_the_first_step_is_that_of_the_masters(world_size, options, tmp_path):
    run_on_ranks(train, world_size, str(tmp_path), options)
    expected = load_file(tmp_path / "model-0.safetensors")
    for step in range(STEPS):
        for name, value in load_file(tmp_path / f"model-{step + 1}.safetensors").items():
            expected[name].lerp_(value, 1 - DECAY)
    found = load_file(tmp_path / "ema.safetensors")
    assert found.keys() == expected.keys()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in expected.values())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
