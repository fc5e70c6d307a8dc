"""What is expected of torch's FSDP beyond its public interface is checked where a model is boosted."""

import contextlib
from unittest import mock

import pytest
import torch
from ranked import raises_on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_fsdp import TorchFSDPPlugin
from booster_testing import expect_on_ranks


class Block(nn.Linear):
    pass


def boosted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(8, 8))
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Block"]))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


REMOVED = {
    "post_backward": (FSDPParamGroup, "post_backward"),
    "reset_sharded_param": (FSDPParam, "reset_sharded_param"),
    "unsharded_param": (FSDPParam, "unsharded_param"),
    "_root_post_backward_final_callback": (FSDPState, "_root_post_backward_final_callback"),
}


@contextlib.contextmanager
def without(kind, name):
    with mock.patch.object(kind, name):
        delattr(kind, name)
        yield


def boost_without(name):
    """Boost under a torch that has another name for something, and can't finalize a backward itself."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without(*REMOVED[name]))
        if hasattr(FSDPModule, "finalize_backward"):
            stack.enter_context(without(FSDPModule, "finalize_backward"))
        boosted()


@pytest.mark.parametrize("name", REMOVED)
def test_torch_that_lacks_something_is_refused(name):
    match = (
        rf"does not know the FSDP of torch {torch.__version__[:4]}.*its `{REMOVED[name][0].__name__}` has no `{name}`"
    )
    expect_on_ranks(ConfigError, match, boost_without, 2, name)


@raises_on_ranks(GradientError, "has not reduced.*Call the boosted model itself", 2)
def test_gradients_that_torch_leaves_unreduced_raise():
    """torch takes the module that runs first for the whole model."""
    booster, model, optimizer = boosted()
    with booster.no_sync(model, optimizer):
        booster.backward(model.module[1](torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
