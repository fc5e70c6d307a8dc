"""`offload_states` and `reload_states`, on the CPU and on the simulated accelerator, whose memory is counted."""

import gc
from dataclasses import replace

import pytest
import torch
from cases import Setting
from matrix import matrix
from plugin_runs import RUNS
from simulated_device import NAME, run_on_devices

from booster_core.errors import ConfigError, OffloadError
from booster_ddp import TorchDDPPlugin
from booster_gemini import GeminiPlugin
from booster_runtime import offload_states, reload_states
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model

SETTINGS = {
    **{name: RUNS[name] for name in ("single", "ddp", "zero2")},
    **{name: replace(RUNS[name], precision="bf16") for name in ("fsdp", "zero1", "gemini", "zero3")},
    "ddp-views": Setting(TorchDDPPlugin, {"gradient_as_bucket_view": True}),
    "gemini-kept": Setting(GeminiPlugin, {"shard_param_frac": 0.0}),
    "gemini-moves": Setting(GeminiPlugin, {"min_chunk_bytes": 8192, "offload_optim_frac": 0.5}, precision="bf16"),
    "tp": replace(RUNS["hybrid-tp"], precision="bf16"),
}


PLACEHOLDERS = 2048
"""Bytes of what stands for values on a device of this kind."""


def train(run, device, *, offloads):
    gc.collect()
    left = torch.simulated.memory_allocated() if device == NAME else 0  # by an earlier run in this process
    torch.manual_seed(0)
    model = tiny_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    booster = replace(SETTINGS[run], device=device).make_booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    tokens = torch.arange(32).view(4, 8).to(device)
    losses, bytes_held = [], []
    for step in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        losses.append(loss.item())
        if offloads and step == 1:  # with gradients
            loss = None
            bytes_held.append(swap(booster, model, optimizer, tokens, left))
        optimizer.step()
        if offloads and step == 2:
            loss = None
            bytes_held.append(swap(booster, model, optimizer, tokens, left))
        optimizer.zero_grad()
    return losses, {name: value.cpu() for name, value in whole_model(booster, model).items()}, bytes_held


def swap(booster, model, optimizer, tokens, left):
    """Offload and reload the model, with the calls in between that must raise; return bytes before and meanwhile."""

    def held():
        return torch.simulated.memory_allocated() - left if booster.device.type == NAME else 0

    before = held()
    freed = offload_states(booster, model)
    between = held()
    with pytest.raises(OffloadError, match="reload_states"):
        model(input_ids=tokens)
    with pytest.raises(OffloadError, match="reload_states"):
        booster.save_model(model, "not written")
    if booster.device.type == "cpu":  # the simulated device can't see all uses
        with pytest.raises((OffloadError, ConfigError, RuntimeError)):
            next(booster.unwrap(model).parameters()).sum().item()
    with pytest.raises(ConfigError, match="offloaded already"):
        offload_states(booster, model)
    reload_states(booster, model)
    with pytest.raises(ConfigError, match="not offloaded"):
        reload_states(booster, model)
    return before, freed, between, held()


DEFAULT = ["cpu-tp", "simulated-ddp-views", "simulated-fsdp", "simulated-gemini-moves", "simulated-zero3"]


@matrix(DEFAULT, device=["cpu", NAME], run=SETTINGS)  # each plugin has one case in the default run
def test_training_goes_on_as_if_nothing_had_happened(run, device, request):
    if device == "cpu" and run == "gemini-moves":
        pytest.skip("on CPUs Gemini offloads to disks only")
    if device == "cpu":
        call, given = run_on_ranks, ()
    else:
        call, given = run_on_devices, (request.getfixturevalue("simulated_device"),)
    world_size = SETTINGS[run].num_ranks
    expected = call(train, world_size, *given, run, device, offloads=False)
    actual = call(train, world_size, *given, run, device, offloads=True)
    for (losses, tensors, bytes_held), (plain_losses, plain_tensors, _) in zip(actual, expected, strict=True):
        assert losses == plain_losses
        assert tensors.keys() == plain_tensors.keys()
        assert all(torch.equal(tensors[name], plain) for name, plain in plain_tensors.items())
        for before, freed, between, after in bytes_held:
            assert abs(after - before) <= PLACEHOLDERS
            assert freed <= before - between + PLACEHOLDERS
            # DDP's buckets are torch's: a fifth of all, or a quarter where gradients are views of them.
            assert between <= (0.25 if run.startswith("ddp") else 0.0) * before + PLACEHOLDERS
