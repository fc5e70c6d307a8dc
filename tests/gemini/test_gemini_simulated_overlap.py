"""Chunks move between a device and its host while the device computes, by the simulated device's timeline."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import simulated_device as sim
import torch
from host_waits import OFFLOADED, waits_in_passes
from matrix import matrix
from simulated_device import Rates, on_devices
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin

WIDTH, DEPTH, BATCH = 64, 16, 512
LAYER_BYTES = WIDTH * WIDTH * 4
LAYER_FLOPS = 2 * BATCH * WIDTH * WIDTH
# A layer's forward takes twice as long as a copy of its parameters, as with 2,048 tokens on an accelerator of 100
# TFLOP/s behind a link of 50 GB/s, and the host's memory is a tenth of the device's.
RATES = Rates(flops=LAYER_FLOPS / 2.0, memory_bytes=100.0 * LAYER_BYTES, link_bytes=1.0 * LAYER_BYTES)
HOST_BYTES_PER_SECOND = RATES.memory_bytes / 10
BYTES_OF_ADAM = 7 * 4
"""What a step of Adam reads and writes of each element: value, gradient and two moments."""


OF_TORCH = torch.optim.AdamW.step


def step_on_host(self, closure=None):
    """Take the host's time for what is stepped there, in the class of torch, which steps bucket by bucket."""
    stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
    numel = sum(p.numel() for p in stepped if p.device.type == "cpu")
    sim.host_works(BYTES_OF_ADAM * numel / HOST_BYTES_PER_SECOND)
    return OF_TORCH(self, closure)


@mock.patch.object(torch.optim.AdamW, "step", step_on_host)
def timed(options, rates):
    """Return how long two steps and their copies take, and how long the second one's passes do."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    booster = Booster("simulated", plugin=GeminiPlugin(min_chunk_bytes=LAYER_BYTES, **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    x = torch.randn(BATCH, WIDTH).to(booster.device)

    marks = []

    def step():
        marks.append(sim.times())
        booster.backward(model(x).square().mean(), optimizer)
        marks.append(sim.times())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.simulated.synchronize()
    sim.start_timeline(rates)
    marks.clear()
    step()
    step()
    torch.simulated.synchronize()
    _, _, begin, end = marks
    passes = end[0] - begin[0], end[1] - begin[1]
    return sim.times(), passes


def share_hidden(options, *, whole_step):
    """Return the share of the time of copies in which something is computed: what an endless link would not save."""
    real, endless = timed(options, RATES), timed(options, replace(RATES, link_bytes=math.inf))
    (seconds, copying), (least, _) = (each[0 if whole_step else 1] for each in (real, endless))
    assert copying >= DEPTH / 2, "something is moved"
    return 1 - (seconds - least) / copying


WAYS = {
    "parameters": {"offload_param_frac": 1.0},
    "half of the parameters": {"offload_param_frac": 0.5},
    "state": {"offload_optim_frac": 1.0},
    "half of the state": {"offload_optim_frac": 0.5},
    "all": {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "half of all": {"offload_param_frac": 0.5, "offload_optim_frac": 0.5},
    "auto": {"placement_policy": "auto", "memory_budget_bytes": 3 * DEPTH * LAYER_BYTES},
}


@pytest.mark.parametrize("way", WAYS)
@on_devices(1)
def test_copies_are_hidden_behind_forward_and_backward(way, simulated_device):
    """Parameters are loaded and gradients offloaded while the device computes."""
    assert share_hidden(WAYS[way], whole_step=False) >= 0.8


@pytest.mark.parametrize("way", ["state", "half of the state", "all", "half of all"])
@on_devices(1)
def test_copies_of_a_whole_step_are_hidden(way, simulated_device):
    """Also those of new values, behind the host's own steps and the next forward."""
    assert share_hidden(WAYS[way], whole_step=True) >= 0.8


@on_devices(1)
def test_a_step_loads_parameters_while_it_evicts_others(simulated_device):
    """Also where every second chunk stays: a copy up does not wait for the one down of the chunk before."""
    assert share_hidden(WAYS["half of the parameters"], whole_step=True) >= 0.7


@matrix(["gemini, all-2", "gemini, half of the state-1", "gemini, auto-1"], name=OFFLOADED, size=[1, 2])
@on_devices("size")
def test_the_host_waits_for_no_copy_in_forward_and_backward(name, size, simulated_device):
    assert waits_in_passes(OFFLOADED[name], "simulated") == []
