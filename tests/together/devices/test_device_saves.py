"""Saves of state on a device: what the host waits for, and in which thread."""

from pathlib import Path

import torch
from engine_calls import EngineCalls
from safetensors.torch import load_file
from simulated_device import NAME, run_on_devices
from torch import nn

from booster_core.ranks import DistCoordinator
from booster_core.state import ReplicatedStateAdapter


def save_while_waits_for_whole_devices_fail(folder, use_async):
    model = nn.Linear(300, 40).to(NAME)
    expected = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    io = EngineCalls(bucket_bytes=1024)
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())

    def refuse(*_):
        msg = "waited for a whole device"
        raise AssertionError(msg)

    real, torch.accelerator.synchronize = torch.accelerator.synchronize, refuse
    try:
        io.save_model(adapter, Path(folder) / "m.safetensors", use_async=use_async)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        io.wait()
    finally:
        torch.accelerator.synchronize = real
    saved = load_file(Path(folder) / "m.safetensors")
    return all(torch.equal(saved[name], value) for name, value in expected.items())


def test_a_save_waits_for_its_copies_alone(simulated_device, tmp_path):
    for use_async in (False, True):
        folder = tmp_path / str(use_async)
        assert run_on_devices(save_while_waits_for_whole_devices_fail, 1, simulated_device, str(folder), use_async) == [
            True
        ]
