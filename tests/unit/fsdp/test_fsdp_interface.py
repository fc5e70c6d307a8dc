from __future__ import annotations

import pytest

from booster_core import Booster, discovery
from booster_core.errors import ConfigError, PluginError
from booster_fsdp import TorchFSDPPlugin


def test_it_is_found_by_name_and_marked_as_not_there_yet():
    assert discovery.load("fsdp") is TorchFSDPPlugin
    assert not TorchFSDPPlugin.available


def test_options_reach_the_config():
    plugin = TorchFSDPPlugin(num_replicas=2, precision="bf16")
    assert plugin.config.num_replicas == 2
    assert plugin.precision.name == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reshard_after_forward": 1}, "`reshard_after_forward=1` is the size of a group"),
        ({"num_replicas": 0}, "`num_replicas=0` must be at least 1"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        TorchFSDPPlugin(**options)


def test_a_wrong_precision_is_refused_at_once():
    with pytest.raises(ConfigError, match="Unknown precision 'int4'"):
        TorchFSDPPlugin(precision="int4")


def test_training_says_what_to_use_instead():
    import torch

    model = torch.nn.Linear(2, 1)
    with pytest.raises(PluginError, match=r"TorchFSDPPlugin does not train yet.*Use plugin='ddp' of booster-ddp"):
        _boost(model)


def _boost(model):
    from booster_core.launch import shutdown

    try:
        Booster(plugin=TorchFSDPPlugin()).boost(model)
    finally:
        shutdown()
