from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing.conformance import PluginConformance
from booster_testing.ranks import expect_on_ranks
from booster_testing.training import train_boosted

if TYPE_CHECKING:
    from collections.abc import Mapping


class TestOneUnit(PluginConformance):
    plugin_class = TorchFSDPPlugin


class TestSmallUnits(PluginConformance):
    plugin_class = TorchFSDPPlugin
    options: ClassVar[Mapping[str, Any]] = {"unit_min_numel": 1}


class TestTwoReplicas(PluginConformance):
    plugin_class = TorchFSDPPlugin
    options: ClassVar[Mapping[str, Any]] = {"replica_size": 2, "unit_classes": ["Linear", "LayerNorm"]}
    world_size = 4

    def test_loads_at_another_world_size(self) -> None:
        other = self.training()
        expect_on_ranks(ConfigError, "`replica_size=2` does not divide the world size 3", train_boosted, 3, other)
