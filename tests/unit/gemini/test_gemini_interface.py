from __future__ import annotations

import pytest

from booster_core import Booster, discovery
from booster_core.errors import ConfigError, PluginError
from booster_gemini import GeminiPlugin


def test_it_is_found_by_name_and_marked_as_not_there_yet():
    assert discovery.load("gemini") is GeminiPlugin
    assert not GeminiPlugin.available


def test_options_reach_the_config():
    plugin = GeminiPlugin(placement_policy="auto", host_budget_bytes=2**30, precision="bf16")
    assert plugin.config.host_budget_bytes == 2**30
    assert plugin.precision.name == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_bytes": 0}, "`chunk_bytes=0` is a number of bytes"),
        ({"offload_param_fraction": 1.5}, "must lie between 0"),
        ({"placement_policy": "auto", "offload_optim_fraction": 0.5}, "is for placement_policy='static'"),
        ({"device_budget_bytes": 5}, "is for placement_policy='auto'"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        GeminiPlugin(**options)


def test_a_wrong_precision_is_refused_at_once():
    with pytest.raises(ConfigError, match="Unknown precision 'int4'"):
        GeminiPlugin(precision="int4")


def test_training_says_what_to_use_instead():
    import torch

    model = torch.nn.Linear(2, 1)
    with pytest.raises(PluginError, match=r"GeminiPlugin does not train yet.*Use plugin='ddp' of booster-ddp"):
        _boost(model)


def _boost(model):
    from booster_core.launch import shutdown

    try:
        Booster(plugin=GeminiPlugin()).boost(model)
    finally:
        shutdown()
