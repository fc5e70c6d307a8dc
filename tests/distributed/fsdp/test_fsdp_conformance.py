from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kit_parts import arithmetic_by_default

from booster_fsdp import TorchFSDPPlugin
from booster_testing.conformance import PluginConformance

if TYPE_CHECKING:
    from collections.abc import Mapping


@arithmetic_by_default
class TestOneUnit(PluginConformance):
    plugin_class = TorchFSDPPlugin
    shares_calls = False


class TestSmallUnits(PluginConformance):
    plugin_class = TorchFSDPPlugin
    options: ClassVar[Mapping[str, Any]] = {"unit_min_numel": 1}


@arithmetic_by_default
class TestTwoReplicas(PluginConformance):
    plugin_class = TorchFSDPPlugin
    options: ClassVar[Mapping[str, Any]] = {"replica_size": 2, "unit_classes": ["Linear", "LayerNorm"]}
    world_size = 4
    other_world_size = 2
    shares_calls = False
