"""Narrow formats where parameters are offloaded: operations are cast for the device that computes."""

import pytest
import torch
from device_runs.small import make_plugin
from device_smoke import CASES
from simulated_device import NAME, run_on_devices
from torch import nn

from booster_core import Booster

OFFLOAD = {"fsdp": "fsdp, offload", "zero 2": "zero 2, offload", "gemini": "gemini, offload"}


class FormatsOf(nn.Module):
    """Shows which formats operations choose."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.seen = []

    def forward(self, x):
        x = self.first(x)
        normed = self.norm(x)
        scores = normed.softmax(-1)
        self.seen = [x.dtype, normed.dtype, scores.dtype]
        return self.second(scores)


def formats_of(case):
    torch.manual_seed(0)
    booster = Booster(NAME, "bf16", make_plugin(case.plugin, case.options))
    module = FormatsOf()
    model, *_ = booster.boost(module, torch.optim.AdamW(module.parameters()))
    output = model(torch.linspace(-1, 1, 32, device=NAME).view(4, 8))
    return module.seen, output.tolist()


@pytest.mark.parametrize("name", OFFLOAD)
def test_operations_have_the_formats_that_they_have_without_offload(name, simulated_device):
    ((expected, outputs),) = run_on_devices(formats_of, 1, simulated_device, CASES[name])
    assert torch.bfloat16 in expected
    assert run_on_devices(formats_of, 1, simulated_device, CASES[OFFLOAD[name]]) == [(expected, outputs)]
