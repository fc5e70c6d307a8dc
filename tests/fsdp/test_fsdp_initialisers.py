"""`torch.nn.init` on sharded parameters: what one process gets under rank 0's seed, or an error with the remedy."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks


def initialisers():
    """Return all functions of `torch.nn.init` that write, with what those need that take more than a tensor."""
    more = {"constant_": (0.5,), "sparse_": (0.3,)}
    named = inspect.getmembers(nn.init, inspect.isfunction)
    return {name: (each, more.get(name, ())) for name, each in named if name.endswith("_") and name[0] != "_"}


def boosted(model):
    return Booster("cpu", plugin=TorchFSDPPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1)).model


def initialise_all(shape):
    """Return what went wrong, by the name of the function."""
    whole = nn.Conv2d(shape[1], shape[0], 3) if len(shape) > 2 else nn.Linear(shape[1], shape[0])
    model = boosted(nn.Sequential(nn.Conv2d(shape[1], shape[0], 3) if len(shape) > 2 else nn.Linear(*shape[::-1])))
    parameter = model.unwrap()[0].weight
    wrong = {}
    every = {f"{name}{args}": (each, args) for name, (each, args) in initialisers().items()}
    # Bounds far from the mean are drawn by rejection, the others again where they are out of bounds.
    every |= {f"trunc_normal_{args}": (nn.init.trunc_normal_, args) for args in ((0, 1, 1, 1.5), (0, 1, -1, 1))}
    for name, (each, args) in every.items():
        torch.manual_seed(5)
        try:
            each(whole.weight, *args)
        except ValueError:  # of other dimensions
            continue
        torch.manual_seed(5 + dist.get_rank())
        try:
            each(parameter, *args)
        except ConfigError as error:
            wrong[name] = str(error)
            continue
        if not torch.equal(parameter.full_tensor(), whole.weight):
            wrong[name] = "other values"
    return wrong


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (4, 3, 3, 3)], ids=["high", "wide", "convolution"])
def test_initialisers_draw_as_in_one_process(shape):
    for wrong in run_on_ranks(initialise_all, 2, shape):
        if shape != (9, 6):
            assert "booster_runtime.gathered" in wrong.pop("orthogonal_()")
        assert wrong == {}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 4))

    def forward(self, data):
        return self.encode(data)

    def encode(self, data):
        return data @ self.table


def call_a_part():
    model = boosted(nn.Sequential(Encoder()))
    with pytest.raises(ConfigError) as raised:
        model.unwrap()[0].encode(torch.ones(2, 4))
    return str(raised.value)


def test_a_method_outside_of_forward_is_named():
    for told in run_on_ranks(call_a_part, 2):
        assert told.startswith("`Encoder.encode` met a sharded parameter together with a plain tensor")
        assert "`forward_methods=`" in told
