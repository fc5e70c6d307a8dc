"""Gathers and reductions of the FSDP plugin that have begun before anybody waits for them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model


class Skipping(nn.Module):
    """Layers, some of which a call may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, skipped=()):
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = torch.tanh(layer(x))
        return x


def batch(number):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def trained(options, *, evaluates, skipped):
    """Return the values after steps, right before which the model has run with some layers left out."""
    rank, size = dist.get_rank(), dist.get_world_size()
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Linear"], **options))
    net = Skipping()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
    for number in range(4):
        booster.backward(model(batch(number)[rank::size]).square().mean(), optimizer)
        with torch.set_grad_enabled(not evaluates):
            model(batch(number)[rank::size], skipped)
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(booster, model)


def in_one_process():
    net = Skipping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for number in range(4):
        net(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.parametrize("evaluates", [True, False], ids=["without gradients", "without backward"])
@pytest.mark.parametrize("options", [{}, {"forward_prefetch": 2}], ids=["default", "two ahead"])
@pytest.mark.parametrize("skipped", [(1,), (1, 2), (3,)], ids=str)
def test_layers_that_were_gathered_ahead_and_left_out_have_the_values_of_the_next_step(options, evaluates, skipped):
    expected = in_one_process()
    for values in run_on_ranks(trained, 2, options, evaluates=evaluates, skipped=skipped):
        assert_same_tensors(values, expected, tolerance_for(torch.float32))


def gradients_seen(replica_size, *, accumulates):
    """Return the gradients that hooks of backward see on later layers, and what training leaves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plugin = TorchFSDPPlugin(unit_classes=["Linear"], replica_size=replica_size)
    booster = Booster("cpu", plugin=plugin)
    net = Skipping()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
    weights, seen = [layer.weight for layer in net.layers], []

    def look(*_):
        seen.append([whole(weight.grad) for weight in weights])

    for layer in net.layers[1:]:
        layer.register_full_backward_hook(look)
    for number in range(2):
        booster.backward(model(batch(number)[rank::size]).square().mean(), optimizer)
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    ends = [whole(parameter.grad) for parameter in net.parameters()]
    return [each for layer in seen for each in layer if each is not None], ends, whole_model(booster, model)


def whole(gradient):
    return None if gradient is None else gradient.full_tensor()


@pytest.mark.parametrize("accumulates", [False, True], ids=["step", "accumulate"])
@pytest.mark.parametrize("replica_size", [1, 2])
def test_a_gradient_that_backward_shows_is_finished(replica_size, accumulates):
    net = Skipping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    expected = []
    for number in range(2):
        net(batch(number)).square().mean().backward()
        expected += [layer.weight.grad.clone() for layer in net.layers]
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    for seen, ends, values in run_on_ranks(gradients_seen, 2 * replica_size, replica_size, accumulates=accumulates):
        assert seen
        for gradient in seen:
            assert any(torch.allclose(gradient, each, atol=1e-6) for each in expected)
        for parameter, gradient in zip(net.parameters(), ends, strict=True):
            assert (gradient is None) == (parameter.grad is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
        assert_same_tensors(values, net.state_dict(), tolerance_for(torch.float32))
