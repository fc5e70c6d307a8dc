"""The simulated accelerator that other tests stand on: the CPU's bits, counted memory, collectives, Booster on it."""

import copy

import pytest
import simulated_device as sim
import torch
import torch.distributed as dist
from simulated_device import run_on_devices
from torch import nn

from booster_core import Booster, Plugin, launch, shutdown
from booster_core.errors import ConfigError
from booster_core.plugin import Capability
from booster_runtime import collectives

DEVICE = "simulated"


def _model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(nn.Embedding(11, 16), layer, nn.SiLU(), nn.Linear(16, 11))


def _train(model, device, precision, steps=3):
    tokens = torch.arange(12).view(2, 6).remainder(11).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(steps):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def _same_bits(precision):
    host = _train(_model(), "cpu", precision)
    device = _train(_model().to(DEVICE), DEVICE, precision)
    return host[0] == device[0] and all(map(torch.equal, host[1], device[1]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_has_the_bits_of_the_cpu(simulated_device, precision):
    assert run_on_devices(_same_bits, 1, simulated_device, precision) == [True]


def _counts():
    before = torch.simulated.memory_allocated(), sim.bytes_moved()
    torch.simulated.reset_peak_memory_stats()
    values = torch.ones(1000).to(DEVICE)
    held = torch.simulated.memory_allocated() - before[0]
    doubled = values * 2
    peak = torch.simulated.max_memory_allocated() - before[0]
    total = doubled.sum().item()
    del values, doubled
    moved = [after - start for start, after in zip(before[1], sim.bytes_moved(), strict=True)]
    return held, peak, total, moved, torch.simulated.memory_allocated() - before[0]


def test_memory_and_copies_are_counted(simulated_device):
    assert run_on_devices(_counts, 1, simulated_device) == [(4000, 8000, 2000.0, [4000, 4], 0)]


def _beyond_the_limit():
    with sim.memory_limit(torch.simulated.memory_allocated() + 1000):
        held = torch.ones(200, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 400 bytes.*the limit is"):
            torch.ones(100, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 800 bytes"):
            held.exp()
    return held.exp().cpu().numel()


def test_a_limit_raises_as_out_of_memory(simulated_device):
    assert run_on_devices(_beyond_the_limit, 1, simulated_device) == [200]


def _mixed():
    matrix = torch.ones(2, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        torch.mm(matrix, torch.ones(2, 2))
    return matrix[torch.tensor([1])].cpu().tolist()


def test_host_and_device_tensors_do_not_mix_but_for_indices(simulated_device):
    assert run_on_devices(_mixed, 1, simulated_device) == [[[1.0, 1.0]]]


def _aliases():
    row = torch.arange(6.0, device=DEVICE)
    row.unfold(0, 2, 2)[1, 0] = 9
    storage = row.untyped_storage()
    pinned = torch.ones(3).pin_memory()
    clone = copy.deepcopy(row)
    storage.resize_(0)
    return clone.tolist(), storage.nbytes(), pinned.is_pinned(), torch.ones(3).is_pinned()


def test_views_storages_and_pinned_memory(simulated_device):
    assert run_on_devices(_aliases, 1, simulated_device) == [([0.0, 1.0, 9.0, 3.0, 4.0, 5.0], 0, True, False)]


def _collectives(bounds):
    rank, size = dist.get_rank(), dist.get_world_size()
    source = torch.arange(12.0, device=DEVICE) * (rank + 1)
    own = torch.zeros(bounds[rank + 1] - bounds[rank], device=DEVICE)
    collectives.reduce_scatter(source, bounds, own).wait()
    whole = torch.zeros(12, device=DEVICE)
    whole[bounds[rank] : bounds[rank + 1]] = own
    collectives.all_gather(whole, bounds).wait()
    total = torch.full((2,), rank + 1.0, device=DEVICE)
    collectives.all_reduce(total).wait()
    first = torch.full((2,), rank + 1.0, device=DEVICE)
    collectives.broadcast(first).wait()
    exchanged = torch.zeros(size, device=DEVICE)
    dist.all_to_all_single(exchanged, torch.arange(float(size), device=DEVICE) + 10 * rank)
    return [each.tolist() for each in (whole, total, first, exchanged)]


@pytest.mark.parametrize("bounds", [(0, 4, 8, 12), (0, 2, 7, 12), (0, 0, 7, 12)], ids=["even", "uneven", "empty"])
def test_collectives_between_devices(simulated_device, bounds):
    for rank, (whole, total, first, exchanged) in enumerate(run_on_devices(_collectives, 3, simulated_device, bounds)):
        assert whole == [6.0 * index for index in range(12)]
        assert (total, first) == ([6.0, 6.0], [1.0, 1.0])
        assert exchanged == [10.0 * other + rank for other in range(3)]


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
