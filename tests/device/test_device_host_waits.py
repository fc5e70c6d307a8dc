"""How often the host waits for the device in a step: not once, so that it prepares work while the device computes."""

import sys
import traceback
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from device_smoke import PLUGINS, Case
from simulated_device import NAME, run_on_devices
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core import Booster

CASES = {
    "fsdp": Case("fsdp"),
    "zero 1": Case("zero", {"stage": 1}),
    "zero 2, overlapped": Case("zero", {"stage": 2, "bucket_bytes": 1 << 14, "overlap_allgather": True}),
    "gemini": Case("gemini", {"min_chunk_bytes": 1 << 15}),
    "hybrid, zero 1": Case("hybrid", {"zero_stage": 1}),
}
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}


class HostWaits(TorchDispatchMode):
    """Counts what the host reads of the device, and where it waits by other means.

    Attributes:
        found: What was called.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __enter__(self):
        sys.setprofile(self._on_call)  # methods of events and streams can't be replaced
        return super().__enter__()

    def __exit__(self, *error):
        sys.setprofile(None)
        return super().__exit__(*error)

    def _on_call(self, frame, event, function):
        del frame
        if event == "c_call" and function.__name__ in ("synchronize", "_accelerator_synchronizeDevice"):
            self.found.append(function.__name__)

    def _where(self):
        frames = traceback.extract_stack()[:-3]
        return " < ".join(f"{frame.filename}:{frame.lineno}" for frame in frames[:-6:-1])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in READS and args[0].device.type == NAME:
            self.found.append(f"{func}: {self._where()}")
        elif func in (aten._to_copy.default, aten.copy_.default):
            source, target = (args[0], result) if func is aten._to_copy.default else (args[1], args[0])
            is_waited_for = not (kwargs.get("non_blocking") or args[2:] == (True,))
            if source.device.type == NAME and target.device.type == "cpu" and is_waited_for:
                self.found.append(f"{func}: {self._where()}")
        return result


def waits_of(case):
    """Return what the host waits for in the fifth step, and that a read of the loss is found."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(32), nn.Linear(32, 1))
    module, name = PLUGINS[case.plugin].split(":")
    booster = Booster(NAME, plugin=getattr(import_module(module), name)(**case.options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    x = torch.full((4, 32), dist.get_rank() + 1.0, device=NAME)

    def step():
        loss = model(x).square().mean()
        booster.backward(loss, optimizer)
        norm = optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    for _ in range(4):
        step()
    with HostWaits() as waits:
        loss, norm = step()
    with HostWaits() as seen:
        assert loss.item() > 0
        assert norm.cpu().isfinite()
        torch.accelerator.synchronize()
    return waits.found, len(seen.found)


@pytest.mark.parametrize("name", CASES)
def test_the_host_does_not_wait_for_the_device_in_a_step(name, simulated_device):
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    for found, seen in run_on_devices(waits_of, CASES[name].world_size, simulated_device, CASES[name], **limits):
        assert found == []
        assert seen == 3, "what is looked for is found"
