"""`verify` passes for every plugin."""

import pytest
import torch
from matrix import matrix
from plugin_runs import runs

from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama
from booster_tools import TrainingFunctions, verify

PLUGINS = runs("ddp", "fsdp", "zero2", "gemini", "hybrid-tp", "hybrid-pp")


def build():
    model = tiny_llama()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(samples=4):
    tokens = torch.randint(16, (samples, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def verify_plugin(name, precision):
    before = torch.get_rng_state()
    report = verify(
        TrainingFunctions(build, batch), PLUGINS[name].plugin(**PLUGINS[name].options), mixed_precision=precision
    )
    assert torch.equal(torch.get_rng_state(), before)
    report.check()
    return [(found.what, found.step, found.name) for found in report.differences]


@matrix(["ddp"], name=PLUGINS)
def test_every_plugin_trains_as_one_process(name):
    first, second = run_on_ranks(verify_plugin, 2, name, None)
    assert first == second
    kinds = {what for what, _, _ in first}
    assert kinds == {"initial parameter", "output", "evaluation loss", "loss", "gradient", "update"}
    names = {name for name, _ in tiny_llama().named_parameters()}
    assert {name for what, step, name in first if (what, step) == ("gradient", 2)} == names


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_bf16_is_compared_with_bf16(name):
    run_on_ranks(verify_plugin, 2, name, "bf16")
