from __future__ import annotations

import pytest

from booster_core import discovery
from booster_core.errors import ConfigError
from booster_zero import LowLevelZeroPlugin


def test_it_is_found_by_name_and_there():
    assert discovery.load("zero") is LowLevelZeroPlugin


def test_options_reach_the_config():
    plugin = LowLevelZeroPlugin(stage=2, cpu_offload=True, precision="bf16")
    assert (plugin.config.stage, plugin.config.cpu_offload) == (2, True)
    assert plugin.precision.name == "bf16"


def test_a_wrong_precision_is_refused_at_once():
    with pytest.raises(ConfigError, match="Unknown precision 'int4'"):
        LowLevelZeroPlugin(precision="int4")
