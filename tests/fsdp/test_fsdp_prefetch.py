"""Units of the FSDP plugin that are gathered ahead of their forward."""

import pytest
import torch
import torch.distributed as dist
from cases import Case, own_loss, train_plainly
from torch import nn

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors
from booster_testing.training import whole_model


class Skipping(nn.Module):
    """Layers, some of which a call may leave out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, skipped=()):
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = torch.tanh(layer(x))
        return x


def batch(number, replica):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + replica))


CASE = Case(build=Skipping, batch=batch, steps=4, max_norm=None)


def trained(options, *, evaluates, skipped):
    """Return gradients and values of steps, right before which the model has run with some layers left out."""
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Linear"], **options))
    model, optimizer, *_ = booster.boost(*CASE.make())
    gradients = []
    for number in range(CASE.steps):
        x = batch(number, dist.get_rank())
        booster.backward(own_loss(model(x), None), optimizer)
        with torch.set_grad_enabled(not evaluates):
            model(x, skipped)
        gradients.append({name: full_gradient(booster, model, name) for name, _ in model.unwrap().named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, whole_model(booster, model)


@pytest.mark.parametrize("evaluates", [True, False], ids=["without gradients", "without backward"])
@pytest.mark.parametrize("options", [{}, {"forward_prefetch": 2}], ids=["default", "two ahead"])
@pytest.mark.parametrize("skipped", [(1,), (1, 2), (3,)], ids=str)
def test_layers_that_were_gathered_ahead_and_left_out_have_the_values_of_the_next_step(options, evaluates, skipped):
    expected = train_plainly(CASE, 2)
    for gradients, values in run_on_ranks(trained, 2, options, evaluates=evaluates, skipped=skipped):
        for ours, theirs in zip(gradients, expected.gradients, strict=True):
            assert_same_tensors(ours, theirs, CASE.tolerance)
        assert_same_tensors(values, expected.parameters, CASE.tolerance)
