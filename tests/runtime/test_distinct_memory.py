import contextlib

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_runtime.lazy import LazyInitContext
from booster_runtime.sharding.checks import check_distinct_memory

WAYS = {"real": contextlib.nullcontext, "lazy": LazyInitContext, "meta": lambda: torch.device("meta")}


def over_one_memory(trained):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = nn.Parameter(net[0].weight.data)
    for layer, requires_grad in zip(net, trained, strict=True):
        layer.weight.requires_grad_(requires_grad)
    return net


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_a_trained_parameter_shares_its_memory_with_none(way, trained):
    with WAYS[way]():
        net = over_one_memory(trained)
    with pytest.raises(ConfigError, match=r"'0.weight' and '1.weight' are two objects over the same memory. Tie them"):
        check_distinct_memory(net)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_ones_may_share_theirs(way):
    with WAYS[way]():
        net = over_one_memory((False, False))
    check_distinct_memory(net)


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_one_memory_ties_and_empty_parameters_are_distinct(way):
    with WAYS[way]():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = net[0].weight
        whole = torch.empty(8, 4)
        net[2].weight, net[2].bias = nn.Parameter(whole[:4]), nn.Parameter(whole[4])
        net.register_parameter("empty", nn.Parameter(torch.empty(0)))
        net.register_parameter("void", nn.Parameter(net.empty.data))
    check_distinct_memory(net)


class Composed(torch.Tensor):
    """A tensor made of others, by torch's protocol."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape)

    def __init__(self, values):
        self.values = values

    def __tensor_flatten__(self):
        return ["values"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0].values) if function is torch.ops.aten.detach.default else NotImplemented


def test_a_parameter_that_is_made_of_others_is_named():
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(Composed(torch.zeros(4, 4)), requires_grad=False)
    with pytest.raises(ConfigError, match=r"'weight' is a `Composed`, made of several tensors"):
        check_distinct_memory(net)
