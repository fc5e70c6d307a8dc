from __future__ import annotations

import pytest

from booster_core import Booster, discovery
from booster_core.errors import ConfigError, PluginError
from booster_zero import LowLevelZeroPlugin


def test_it_is_found_by_name_and_marked_as_not_there_yet():
    assert discovery.load("zero") is LowLevelZeroPlugin
    assert not LowLevelZeroPlugin.available


def test_options_reach_the_config():
    plugin = LowLevelZeroPlugin(stage=2, cpu_offload=True, precision="bf16")
    assert (plugin.config.stage, plugin.config.cpu_offload) == (2, True)
    assert plugin.precision.name == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, "`stage=3` is not one of 1"),
        ({"bucket_bytes": 0}, "`bucket_bytes=0` must be positive"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        LowLevelZeroPlugin(**options)


def test_a_wrong_precision_is_refused_at_once():
    with pytest.raises(ConfigError, match="Unknown precision 'int4'"):
        LowLevelZeroPlugin(precision="int4")


def test_training_says_what_to_use_instead():
    import torch

    model = torch.nn.Linear(2, 1)
    with pytest.raises(PluginError, match=r"LowLevelZeroPlugin does not train yet.*Use plugin='ddp' of booster-ddp"):
        _boost(model)


def _boost(model):
    from booster_core.launch import shutdown

    try:
        Booster(plugin=LowLevelZeroPlugin()).boost(model)
    finally:
        shutdown()
