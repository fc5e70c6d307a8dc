"""The stand-in for a gradient that is split over the ranks tells what it is like, and refuses to be read."""

import copy
import pickle

import pytest
import torch
from torch import nn

from booster_core.errors import GradientError
from booster_zero.engine.stand_ins import ShardedGradient

READS = {
    **{name: lambda gradient, name=name: getattr(gradient, name) for name in ("data", "T", "mT", "H", "mH")},
    **{name: lambda gradient, name=name: getattr(gradient, name) for name in ("real", "imag")},
    "sum": lambda gradient: gradient + 1,
    "norm": lambda gradient: gradient.norm(),
    "norm by function": torch.linalg.vector_norm,
    "clone": lambda gradient: gradient.clone(),
    "conversion": lambda gradient: gradient.double(),
    "element": lambda gradient: gradient[0, 0],
    "item": lambda gradient: gradient.sum().item(),
    "comparison": lambda gradient: torch.equal(gradient, torch.ones(2, 3)),
    "change": lambda gradient: gradient.mul_(2),
    "change of many": lambda gradient: torch._foreach_mul_([gradient], 2),
    "write": lambda gradient: gradient.copy_(torch.ones(2, 3)),
    "as the source": lambda gradient: torch.ones(2, 3).copy_(gradient),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


def stand_in():
    return ShardedGradient(nn.Parameter(torch.ones(2, 3)), "layer.weight", lambda: None)


@pytest.mark.parametrize("read", READS)
def test_reading_and_changing_raise_with_the_remedy(read):
    with pytest.raises(
        GradientError,
        match=r"gradient of 'layer\.weight' is split.*`booster_runtime\.full_gradient\(booster, model, 'la",
    ):
        READS[read](stand_in())


def test_it_is_described_as_the_gradient():
    gradient = stand_in()
    assert (gradient.shape, gradient.size(1), gradient.ndim, gradient.dim()) == ((2, 3), 3, 2, 2)
    assert (gradient.numel(), torch.numel(gradient), len(gradient)) == (6, 6, 2)
    assert (gradient.dtype, gradient.device, gradient.layout) == (torch.float32, torch.device("cpu"), torch.strided)
    assert (gradient.is_floating_point(), torch.is_complex(gradient), gradient.is_sparse) == (True, False, False)
    assert (gradient.stride(), gradient.is_contiguous(), gradient.element_size()) == ((3, 1), True, 4)
    assert not gradient.requires_grad


def test_it_is_printed_by_the_name_of_its_parameter():
    text = "ShardedGradient('layer.weight', shape=(2, 3), dtype=torch.float32)"
    assert repr(stand_in()) == text
    assert f"{stand_in()}" == text


def test_it_may_be_detached_as_zero_grad_of_torch_does():
    gradient = stand_in()
    assert gradient.detach_() is gradient
