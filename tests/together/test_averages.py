"""Averages of weights under every plugin: those of what the optimizer updates, wherever it is, and without a trace."""

from dataclasses import replace

import pytest
import torch
from cases import Setting, tokens
from matrix import matrix
from plugin_runs import runs, step
from ranked import on_ranks
from safetensors.torch import load_file
from torch import nn

import booster_runtime
from booster_core.ranks import DistCoordinator
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

DECAY, STEPS = 0.75, 3
SMALL = {"bucket_bytes": 2048}
SETTINGS = {
    **runs("ddp", "fsdp", "zero2", "gemini", "hybrid-tp", "zero3"),
    "zero1": Setting(LowLevelZeroPlugin, SMALL),
    "zero whole": Setting(LowLevelZeroPlugin, {**SMALL, "partition": "parameter"}),
    "zero offloaded": Setting(LowLevelZeroPlugin, {**SMALL, "offload": "cpu"}),
    "zero overlapping": Setting(LowLevelZeroPlugin, {**SMALL, "overlap_allgather": True}),
    "gemini whole": Setting(GeminiPlugin, {"min_chunk_bytes": 4096, "partition": "parameter"}),
    "gemini gathered": Setting(GeminiPlugin, {"min_chunk_bytes": 4096, "shard_param_frac": 0.0}),
    "gemini on a disk": Setting(GeminiPlugin, {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}),
    "tp-zero1": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}, 4),
}


class Counting(nn.Module):
    """A language model that counts its calls in a buffer, which is no average but a copy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = tiny_llama()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, **batch):
        self.calls += 1
        return self.inner(**batch)


def make(name):
    return tiny_llama() if "tp" in name else Counting()


def late(net):
    """Return a layer that may be frozen at first."""
    return net.inner.model.layers[0]


def boosted(name, precision, folder, *, freezes=False):
    torch.manual_seed(0)
    setting = replace(SETTINGS[name], precision=precision)
    if name == "gemini on a disk":
        setting = replace(setting, options={**setting.options, "offload_dir": str(folder)})
    booster, net = setting.make_booster(), make(name)
    if freezes:
        late(net).requires_grad_(requires_grad=False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return booster, *booster.boost(net, torch.optim.AdamW(trained, lr=0.01))[:2]


def train(booster, model, optimizer, number):
    index, _ = booster.plugin.data_parallel_coordinates(DistCoordinator())
    step(booster, model, optimizer, tokens(2, 8)(number, index))


def averaged(name, precision, folder, *, freezes=False):
    """Save the model after each step, and the averages; return the model with averages, before that and after it."""
    run = booster, model, optimizer = boosted(name, precision, folder, freezes=freezes)
    average = booster_runtime.ema(booster, model, DECAY)
    booster.save_model(model, folder / "0.safetensors")
    for number in range(STEPS):
        if freezes and number == 1:
            late(model.unwrap()).requires_grad_()
            optimizer.add_param_group({"params": [*late(model.unwrap()).parameters()]})
        train(*run, number)
        average.update()
        booster.save_model(model, folder / f"{number + 1}.safetensors")
    average.save(folder / "average.safetensors")
    before = whole_model(booster, model)
    with average.applied():
        inside = whole_model(booster, model)
    found = before, inside, whole_model(booster, model)
    train(*run, STEPS)
    return *found, whole_model(booster, model)


def averages_of_files(folder):
    """Return the averages that were saved, once they are those of the models in the files."""
    expected = load_file(folder / "0.safetensors")
    for number in range(STEPS):
        for key, value in load_file(folder / f"{number + 1}.safetensors").items():
            if key == "calls":
                expected[key] = value
            else:
                expected[key].lerp_(value, 1 - DECAY)  # files have the masters
    found = load_file(folder / "average.safetensors")
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []
    return expected


@matrix(
    ["zero whole-bf16", "zero overlapping-bf16", "gemini on a disk-fp32", "fsdp-fp32", "zero3-bf16", "tp-zero1-bf16"],
    name=SETTINGS,
    precision=["fp32", "bf16"],
)
@on_ranks(lambda name: SETTINGS[name].num_ranks)
def test_averages_are_those_of_what_the_optimizer_updates_and_leave_no_trace(name, precision, tmp_path):
    before, inside, after, later = averaged(name, precision, tmp_path)
    expected = averages_of_files(tmp_path)
    assert [key for key, value in before.items() if not torch.equal(after[key], value)] == []
    names = [key for key in inside if key in expected]
    assert len(names) >= len(expected) - 1  # a tied one has another name in files
    assert [key for key in names if not torch.equal(inside[key], expected[key].to(inside[key].dtype))] == []
    undisturbed = boosted(name, precision, tmp_path)
    for number in range(STEPS + 1):
        train(*undisturbed, number)
    wanted = whole_model(*undisturbed[:2])
    assert [key for key, value in wanted.items() if not torch.equal(later[key], value)] == []


@pytest.mark.parametrize("name", ["zero1", "gemini"])
@on_ranks(2)
def test_a_parameter_that_is_unfrozen_later_is_averaged_on(name, tmp_path):
    """Gemini gets new chunks for it."""
    averaged(name, "bf16", tmp_path, freezes=True)
    averages_of_files(tmp_path)


@pytest.mark.parametrize(("saving", "loading"), [("zero1", "zero2"), ("gemini", "gemini"), ("tp-zero1", "hybrid-tp")])
def test_saved_averages_load_under_another_setting_and_into_a_model_without_an_optimizer(saving, loading, tmp_path):
    run_on_ranks(averaged, SETTINGS[saving].num_ranks, saving, "bf16", tmp_path)
    saved = load_file(tmp_path / "average.safetensors")
    for loaded in run_on_ranks(evaluated, SETTINGS[loading].num_ranks, loading, tmp_path):
        names = [key for key in loaded if key in saved]
        assert [key for key in names if not torch.equal(loaded[key], saved[key].to(loaded[key].dtype))] == []


def evaluated(name, folder):
    booster = replace(SETTINGS[name], precision="bf16").make_booster()
    model, *_ = booster.boost(make(name))
    average = booster_runtime.ema(booster, model)
    average.load(folder / "average.safetensors")
    with average.applied():
        return whole_model(booster, model)
