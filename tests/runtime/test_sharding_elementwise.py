import pytest
import torch
from torch import nn, optim

from booster_core.errors import ConfigError
from booster_runtime.sharding import partition_for


def parameters():
    return [nn.Parameter(torch.ones(3, 2))]


class Own(optim.AdamW):
    """A class that torch does not have: nothing tells what its step does."""


class Elementwise(Own):
    is_elementwise = True


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (optim.SGD, "flat"),
        (optim.AdamW, "flat"),
        (optim.ASGD, "flat"),
        (optim.Adafactor, "parameter"),
        (optim.Muon, "parameter"),
        (Own, "parameter"),
        (Elementwise, "flat"),
    ],
)
def test_the_class_says_whether_parameters_may_be_cut(kind, expected):
    state = torch.get_rng_state()
    assert partition_for(kind(parameters(), lr=0.1), "auto") == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_a_choice_goes_before_the_class():
    assert partition_for(Own(parameters()), "flat") == "flat"
    assert partition_for(optim.SGD(parameters()), "parameter") == "parameter"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.LBFGS(parameters()), "LBFGS can't be sharded"),
        (lambda: optim.SparseAdam(parameters()), "SparseAdam takes sparse gradients"),
        (lambda: Own([{"params": parameters(), "max_grad_norm": 1.0}]), "`max_grad_norm=1.0`.*the plugin clip"),
        (lambda: Own([{"params": parameters(), "d": 1e-6}]), "`d=1e-06`.*estimates its step size"),
    ],
    ids=["lbfgs", "sparse", "lamb", "prodigy"],
)
def test_what_cannot_be_sharded_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        partition_for(make(), "auto")
