"""Gradients that nobody would reduce raise, and gradients can be set by hand."""

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_core.plugin import write_gradient
from booster_core.precision import PrecisionPolicy
from booster_runtime.sharding import refuse_gradient, working_dtypes
from booster_runtime.sharding.checks import not_optimized


def test_a_frozen_parameter_is_watched_until_it_is_not():
    layer = nn.Linear(2, 1)
    layer.weight.requires_grad_(requires_grad=False)
    handle = refuse_gradient(layer.weight, "weight")
    assert not layer.weight.requires_grad
    layer(torch.ones(1, 2)).sum().backward()  # the bias may have a gradient
    layer.weight.requires_grad_()
    with pytest.raises(GradientError, match="'weight' got a gradient, but it was frozen at `boost`"):
        layer(torch.ones(1, 2)).sum().backward()
    handle.remove()
    layer(torch.ones(1, 2)).sum().backward()


def test_what_can_have_no_gradient_needs_no_watch():
    counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    assert refuse_gradient(counts, "counts") is None
    with torch.inference_mode():
        inferred = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert refuse_gradient(inferred, "inferred") is None


def test_written_gradients_get_the_loss_scale():
    model, booster = nn.Linear(2, 1), Booster("cpu", "fp16")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    gradient = torch.zeros(3)
    write_gradient(gradient, torch.ones(3), optimizer)
    assert torch.equal(gradient, torch.ones(3)), "no backward has multiplied its loss"
    booster.backward(model(torch.ones(1, 2)).sum(), optimizer)
    write_gradient(gradient, torch.ones(3), optimizer)
    assert torch.equal(gradient, torch.full((3,), float(optimizer.loss_scaler.scale)))
    write_gradient(gradient, torch.ones(3), None)
    assert torch.equal(gradient, torch.ones(3))
    assert "The gradient of 'x' can't be set" in str(not_optimized("x"))


def test_formats_of_parameters_under_a_narrow_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_parameter("count", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    narrow = PrecisionPolicy(compute_dtype=torch.bfloat16, param_dtype=torch.bfloat16)
    dtype_of = working_dtypes(model, narrow)
    assert dtype_of(model[0].weight) == torch.bfloat16
    assert dtype_of(model[1].weight) == torch.float32, "torch's kernel needs it"
    assert dtype_of(model.count) == torch.int64
    assert working_dtypes(model, PrecisionPolicy(param_dtype=None))(model[0].weight) == torch.float32
    assert working_dtypes(model, PrecisionPolicy(param_dtype=torch.float64))(model[1].weight) == torch.float64
