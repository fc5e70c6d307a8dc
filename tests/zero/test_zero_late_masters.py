"""Parameters that begin to train after `boost`, in bf16: they get fp32 masters, as those of the first groups do."""

import pytest
import torch
import torch.distributed as dist
from gathering_plugin import GatheringPlugin
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

STEPS, LR = 20, 1e-3


def make_rounded():
    """Return a model whose values bf16 has, too, as those of pretrained weights in bf16."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
    for layer in (net[0], net[2]):
        layer.weight.data = layer.weight.data.bfloat16().float()
    return net


def rows(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def masters_of_one_process(num_ranks):
    """Train as mixed precision is defined: gradients of bf16 weights, updates of fp32 ones that are rounded again."""
    net, masters = make_rounded(), make_rounded()
    net.bfloat16()
    optimizer = torch.optim.Adam(masters[2].parameters(), lr=LR)
    for step in range(STEPS + 2):
        if step == 2:
            optimizer.add_param_group({"params": list(masters[0].parameters())})
        for master in masters.parameters():
            master.grad = torch.zeros_like(master)
        for rank in range(num_ranks):
            net.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                net(rows(step, rank)).float().square().mean().backward()
            for master, parameter in zip(masters.parameters(), net.parameters(), strict=True):
                master.grad += parameter.grad.float() / num_ranks
        optimizer.step()
        for master, parameter in zip(masters.parameters(), net.parameters(), strict=True):
            parameter.data.copy_(master)
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


LATE = {
    "chunks": lambda: GatheringPlugin(chunk_bytes=64),
    "replicas": lambda: GatheringPlugin(chunk_bytes=64, replica_size=2),
    "zero1": LowLevelZeroPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
}


@pytest.mark.parametrize("name", LATE)
@on_ranks(2)
def test_a_parameter_that_is_added_later_trains_as_in_one_process(name):
    expected = masters_of_one_process(2)
    assert (expected["0.weight"].float() - make_rounded()[0].weight).abs().max() > 0.01
    net = make_rounded()
    net[0].requires_grad_(requires_grad=False)
    booster = Booster("cpu", "bf16", LATE[name]())
    model, optimizer, *_ = booster.boost(net, torch.optim.Adam(net[2].parameters(), lr=LR))
    for step in range(STEPS + 2):
        if step == 2:
            net[0].requires_grad_()
            optimizer.add_param_group({"params": list(net[0].parameters())})
        booster.backward(model(rows(step, dist.get_rank())).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    found = whole_model(booster, model)
    for key, values in expected.items():
        # Equal but for one rounding of bf16: gradients are averaged in another order.
        torch.testing.assert_close(found[key].float(), values.float(), rtol=2**-7, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", LATE)
@on_ranks(2)
def test_what_was_written_before_a_parameter_is_added_stays(name):
    """Write to a layer that trains and that no optimizer lists, let one list it, and step with a rate of 0."""
    net = make_rounded()
    booster = Booster("cpu", "bf16", LATE[name]())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net[2].parameters(), lr=0.0))
    written = {key: -2 * values for key, values in make_rounded().state_dict().items()}
    model.load_state_dict(written)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    before = whole_model(booster, model)
    booster.backward(model(rows(0, dist.get_rank())).float().square().mean(), optimizer)
    optimizer.step()
    for found in (before, whole_model(booster, model)):
        assert_same_tensors({key: values.float() for key, values in found.items()}, written, EXACT)
