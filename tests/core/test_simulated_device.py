"""Booster on the simulated accelerator that other tests stand on."""

import pytest
import simulated_device as sim
import torch
import torch.distributed as dist
from simulated_device import run_on_devices
from torch import nn

from booster_core import Booster, Plugin, launch, shutdown
from booster_core.errors import ConfigError
from booster_core.plugin import Capability

DEVICE = "simulated"


def _model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(nn.Embedding(11, 16), layer, nn.SiLU(), nn.Linear(16, 11))


def _boosted_losses(device):
    booster = Booster(device)
    model = _model()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    tokens = torch.arange(12).view(2, 6).remainder(11).to(booster.device)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(boosted(tokens).flatten(0, 1), tokens.flatten())
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, next(boosted.parameters()).device.type


def test_booster_trains_on_the_device(simulated_device):
    [(expected, _)] = run_on_devices(_boosted_losses, 1, simulated_device, "cpu")
    assert run_on_devices(_boosted_losses, 1, simulated_device, DEVICE) == [(expected, DEVICE)]


def _launched_losses():
    """Return what a launch and `Booster` choose where nothing is asked for, and the losses of a training there."""
    shutdown()
    launch(seed=None, verbose=False)
    losses, device = _boosted_losses(None)
    return losses, device, dist.get_backend_config(), str(Booster().device)


def test_a_launch_takes_the_device_and_the_backend_that_torch_names(simulated_device):
    [(expected, _)] = run_on_devices(_boosted_losses, 1, simulated_device, "cpu")
    chosen = (expected, DEVICE, sim.BACKEND, f"{DEVICE}:0")
    assert run_on_devices(_launched_losses, 1, simulated_device) == [chosen]


class _OnlyCpu(Plugin):
    name = "only-cpu"
    api_version = 2
    capabilities = frozenset({Capability.CPU, Capability.FP32})

    def configure(self, objects, context):
        return objects


class _AlsoCuda(_OnlyCpu):
    capabilities = _OnlyCpu.capabilities | {Capability.CUDA}


def _accepts():
    with pytest.raises(ConfigError, match="'only-cpu' does not run on device type 'simulated'"):
        Booster(device=DEVICE, plugin=_OnlyCpu())
    return Booster(device=DEVICE, plugin=_AlsoCuda()).device.type, Booster(plugin=_OnlyCpu()).device.type


def test_plugins_for_cuda_take_it_and_others_refuse(simulated_device):
    assert run_on_devices(_accepts, 1, simulated_device) == [(DEVICE, "cpu")]
