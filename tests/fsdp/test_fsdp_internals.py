"""What is expected of torch's FSDP beyond its public interface is checked where a model is boosted."""

import contextlib
from unittest import mock

import pytest
import torch
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_fsdp import TorchFSDPPlugin


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


@pytest.mark.parametrize("name", REMOVED)
@on_ranks(2)
def test_torch_that_lacks_something_is_refused(name):
    match = (
        rf"does not know the FSDP of torch {torch.__version__[:4]}.*its `{REMOVED[name][0].__name__}` has no `{name}`"
    )
    with contextlib.ExitStack() as stack:
        for kind, attribute in (REMOVED[name], (FSDPModule, "finalize_backward")):  # which needs no private names
            if hasattr(kind, attribute):
                stack.enter_context(mock.patch.object(kind, attribute))
                delattr(kind, attribute)
        with pytest.raises(ConfigError, match=match):
            boosted()


@raises_on_ranks(GradientError, "has not reduced.*Call the boosted model itself", 2)
def test_gradients_that_torch_leaves_unreduced_raise():
    """torch takes the module that runs first for the whole model."""
    booster, model, optimizer = boosted()
    with booster.no_sync(model, optimizer):
        booster.backward(model.module[1](torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
