"""Pipelines on devices: a host that waits for all of its streams in the middle of a batch stops nobody."""

from unittest import mock

import device_smoke
import pytest
import torch
import torch.distributed as dist
from device_smoke import Case
from simulated_device import NAME, run_on_devices

CASES = {
    "1f1b": {"pp_size": 2, "num_microbatches": 4},
    "interleaved": {"pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2},
    "zbv": {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv"},
}


class _Synchronizing(torch.nn.Module):
    """Waits for the device, as a host does where it frees memory or loads a kernel."""

    def __init__(self, inner, rank):
        super().__init__()
        self.inner, self.rank = inner, rank

    def forward(self, *args, **kwargs):
        found = self.inner(*args, **kwargs)
        if dist.get_rank() == self.rank:
            torch.accelerator.synchronize()
        return found


def train(case, rank):
    make_model = device_smoke.make_model

    def make():
        model = make_model()
        for layer in model.model.layers:
            layer.mlp = _Synchronizing(layer.mlp, rank)
        return model

    with mock.patch.object(device_smoke, "make_model", make):
        run = device_smoke.Run(case, NAME, "fp32")
    return [run.step(number) for number in range(4)], device_smoke.train_plainly("cpu")[0][:4]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "style", [pytest.param(name, marks=[] if name == "zbv" else pytest.mark.slow) for name in CASES]
)
def test_a_host_that_waits_for_the_device_stops_no_pipeline(style, rank, simulated_device):
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 30.0}
    for losses, expected in run_on_devices(train, 2, simulated_device, Case("hybrid", CASES[style]), rank, **limits):
        assert losses == pytest.approx(expected, rel=1e-5)
