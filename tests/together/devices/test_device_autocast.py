"""Narrow formats where parameters are offloaded: operations are cast for the device that computes."""

import pytest
import torch
from device_smoke import CASES
from simulated_device import NAME, on_devices
from torch import nn


@pytest.mark.parametrize("name", ["fsdp", "zero 2", "gemini"])
@on_devices(1)
def test_operations_have_the_formats_that_they_have_without_offload(name, simulated_device):
    def formats_and_outputs(case):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Softmax(-1), nn.Linear(16, 4))
        seen = []
        for layer in layers:
            layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
        model, *_ = case.make_booster(NAME, "bf16").boost(layers, torch.optim.AdamW(layers.parameters()))
        return seen, model(torch.linspace(-1, 1, 32, device=NAME).view(4, 8)).tolist()

    expected, outputs = formats_and_outputs(CASES[name])
    assert torch.bfloat16 in expected
    assert formats_and_outputs(CASES[f"{name}, offload"]) == (expected, outputs)
