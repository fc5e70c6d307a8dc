"""Ranks that built their plugin with other options are told so by `boost`, on every rank; folders may differ."""

import pytest
import torch
from torch import nn

from booster_core import Booster, DistCoordinator
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    TorchDDPPlugin: ("bucket_cap_mb", 1.0, 2.0),
    TorchFSDPPlugin: ("reshard_after_forward", True, False),
    LowLevelZeroPlugin: ("bucket_bytes", 4096, 8192),
    GeminiPlugin: ("min_chunk_bytes", 4096, 8192),
}


def boost(plugin):
    model = nn.Linear(4, 4)
    Booster("cpu", plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return True


def boost_apart(plugin_class, name, values):
    boost(plugin_class(**{name: values[DistCoordinator().rank]}))


@pytest.mark.parametrize("plugin_class", PLUGINS)
def test_options_that_differ_between_ranks_are_refused(plugin_class):
    name, one, other = PLUGINS[plugin_class]
    message = rf"Ranks disagree about `{name}`: {one} on rank 0, {other} on rank 1, in `boost`"
    expect_on_ranks(ConfigError, message, boost_apart, 2, plugin_class, name, (one, other))


def boost_in_folders(folder):
    own = folder / str(DistCoordinator().rank)
    own.mkdir()
    return boost(GeminiPlugin(offload_optim_frac=1.0, offload_dir=own))


def test_folders_may_differ(tmp_path):
    assert run_on_ranks(boost_in_folders, 2, tmp_path) == [True, True]


def boost_with_a_group():
    from torch.distributed import group
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return boost(TorchDDPPlugin(comm_hook=allreduce_hook, comm_hook_state=group.WORLD))


def test_an_option_that_cannot_be_copied_is_compared():
    assert run_on_ranks(boost_with_a_group, 2) == [True, True]
