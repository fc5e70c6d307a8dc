"""Saves and loads of state on a device: what the host waits for, and in which thread; copies that are under way."""

from pathlib import Path
from unittest import mock

import torch
from engine_calls import EngineCalls
from host_waits import HostWaits
from safetensors.torch import load_file
from simulated_device import NAME, run_on_devices
from torch import nn

from booster_core.ranks import DistCoordinator
from booster_core.state import ReplicatedStateAdapter


def adapter_of(model):
    return ReplicatedStateAdapter(model, None, DistCoordinator())


def save_while_waits_for_whole_devices_fail(folder, use_async):
    """Through halves of a bucket that hold a part of the matrix each; a copy that is read too early is not a number."""
    model = nn.Linear(300, 40).to(NAME)
    expected = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    io = EngineCalls(bucket_bytes=1024)
    refusal = AssertionError("waited for a whole device")
    with mock.patch.object(torch.accelerator, "synchronize", side_effect=refusal):
        with HostWaits(NAME) as waits:
            io.save_model(adapter_of(model), Path(folder) / "m.safetensors", use_async=use_async)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        io.wait()
    saved = load_file(Path(folder) / "m.safetensors")
    return all(torch.equal(saved[name], value) for name, value in expected.items()), len(waits.found)


def test_a_save_waits_for_its_copies_alone(simulated_device, tmp_path):
    for use_async in (False, True):
        folder = tmp_path / str(use_async)
        [(is_right, num_waits)] = run_on_devices(
            save_while_waits_for_whole_devices_fail, 1, simulated_device, str(folder), use_async
        )
        assert is_right
        assert (num_waits == 0) == use_async  # in the background, that thread waits


def load_through_stages(path, dtype, num_threads):
    model = nn.Linear(300, 40, dtype=dtype).to(NAME)
    EngineCalls(bucket_bytes=1024).load_model(adapter_of(model), path, num_threads=num_threads)
    with torch.no_grad():  # in the stream, after what was loaded
        return {name: (tensor + 1).cpu() for name, tensor in model.state_dict().items()}


def test_what_is_loaded_is_there_for_the_stream(simulated_device, tmp_path):
    model = nn.Linear(300, 40)
    EngineCalls().save_model(adapter_of(model), tmp_path / "m.safetensors")
    for dtype, num_threads in ((torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 1)):
        [found] = run_on_devices(
            load_through_stages, 1, simulated_device, str(tmp_path / "m.safetensors"), dtype, num_threads
        )
        for name, value in model.state_dict().items():
            assert torch.equal(found[name], value.to(dtype) + 1)
