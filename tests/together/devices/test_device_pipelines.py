"""Pipelines on devices: messages come while others compute, and a host that waits for all streams stops nobody."""

import math
from unittest import mock

import device_smoke
import pytest
import simulated_device as sim
import torch
import torch.distributed as dist
from device_smoke import Case
from simulated_device import NAME, Rates, on_devices

from booster_hybrid.pipeline.p2p import P2PChannel, make_channels

CASES = {
    "1f1b": {"pp_size": 2, "num_microbatches": 4},
    "interleaved": {"pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2},
    "zbv": {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv"},
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "style", [pytest.param(name, marks=[] if name == "zbv" else pytest.mark.slow) for name in CASES]
)
@on_devices(2, timeout_seconds=240.0, group_timeout_seconds=30.0)
def test_a_host_that_waits_for_the_device_stops_no_pipeline(style, rank, simulated_device):
    """As hosts do where they free memory or load a kernel."""
    make_model = device_smoke.make_model

    def wait_on_the_rank(*_):
        if dist.get_rank() == rank:
            torch.accelerator.synchronize()

    def make():
        model = make_model()
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(wait_on_the_rank)
        return model

    with mock.patch.object(device_smoke, "make_model", make):
        run = device_smoke.Run(Case("hybrid", CASES[style]), NAME, "fp32")
    expected = device_smoke.train_plainly("cpu")[0][:4]
    assert [run.step(number) for number in range(4)] == pytest.approx(expected, rel=1e-5)


SIDE, SECONDS = 32, 10.0
RATES = Rates(flops=2 * SIDE**3 / SECONDS, memory_bytes=math.inf, link_bytes=math.inf)


@on_devices(2)
def test_tensors_of_usual_shapes_come_while_what_was_started_before_is_computed(simulated_device):
    """A rank computes between what it expects and what it receives."""

    class Watched(P2PChannel):
        """Computes with each tensor as soon as it is there, in a stream of its own."""

        def _ask(self, tensor, sender):
            work, tensor = super()._ask(tensor, sender)
            if tensor.device.type != "cpu":
                with torch.Stream(tensor.device):
                    work.wait()
                    tensor @ tensor
            return work, tensor

    device, rank = torch.device(NAME), dist.get_rank()
    link = Watched(["x"], range(2), rank, make_channels([range(2)]), device)
    link.connect()
    torch.accelerator.synchronize()
    ends = []
    for number in range(4):
        value = torch.full((SIDE, SIDE), number + 1.0)
        if rank == 0:
            link.send({"x": value.to(device)}, 1)
            continue
        weight = torch.ones(SIDE, SIDE, device=device)
        link.expect(0)
        torch.accelerator.synchronize()
        sim.start_timeline(RATES)
        weight @ weight
        received = link.receive(0)
        ends.append(sim.times()[0])
        torch.accelerator.synchronize()
        assert torch.equal(received["x"].cpu(), value)
    link.finish()
    # The third message is the first whose shape is known ahead; each takes 10 s to be computed with, as what is
    # started before it does.
    assert ends == pytest.approx([2 * SECONDS, 2 * SECONDS, SECONDS, SECONDS] if rank == 1 else [])
