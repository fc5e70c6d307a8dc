"""Saves and loads of state on a device: what the host waits for, and in which thread; copies that are under way."""

from unittest import mock

import torch
from engine_calls import EngineCalls
from host_waits import HostWaits
from safetensors.torch import load_file
from simulated_device import NAME, on_devices
from torch import nn

from booster_core.ranks import DistCoordinator
from booster_core.state import ReplicatedStateAdapter


def adapter_of(model):
    return ReplicatedStateAdapter(model, None, DistCoordinator())


@on_devices(1)
def test_a_save_waits_for_its_copies_alone(simulated_device, tmp_path):
    """Through halves of a bucket that hold a part of the matrix each; a copy that is read too early is not a number."""
    for use_async in (False, True):
        model = nn.Linear(300, 40).to(NAME)
        expected = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
        io, path = EngineCalls(bucket_bytes=1024), tmp_path / f"{use_async}.safetensors"
        refusal = AssertionError("waited for a whole device")
        with mock.patch.object(torch.accelerator, "synchronize", side_effect=refusal):
            with HostWaits(NAME) as waits:
                io.save_model(adapter_of(model), path, use_async=use_async)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            io.wait()
        torch.testing.assert_close(load_file(path), expected, rtol=0, atol=0)
        assert (not waits.found) == use_async, "in the background, that thread waits"


@on_devices(1)
def test_what_is_loaded_is_there_for_the_stream(simulated_device, tmp_path):
    saved = nn.Linear(300, 40)
    path = tmp_path / "m.safetensors"
    EngineCalls().save_model(adapter_of(saved), path)
    for dtype, num_threads in ((torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 1)):
        model = nn.Linear(300, 40, dtype=dtype).to(NAME)
        EngineCalls(bucket_bytes=1024).load_model(
            adapter_of(model), tmp_path / "m.safetensors", num_threads=num_threads
        )
        with torch.no_grad():  # in the stream, after what was loaded
            found = {name: (tensor + 1).cpu() for name, tensor in model.state_dict().items()}
        for name, value in saved.state_dict().items():
            assert torch.equal(found[name], value.to(dtype) + 1)
