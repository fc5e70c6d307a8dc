from typing import ClassVar

from kit_cases import VariantConformance, slow_cases

from booster_fsdp import TorchFSDPPlugin
from booster_testing.conformance import PluginConformance


class TestOneUnit(VariantConformance):
    plugin_class = TorchFSDPPlugin


@slow_cases(
    "test_resumed_run_continues_exactly[fp32]",
    "test_resumed_run_continues_exactly[bf16]",
    "test_checkpoint_of_one_device_loads[fp32]",
    "test_checkpoint_of_one_device_loads[fp16]",
)
class TestSmallUnits(PluginConformance):
    plugin_class = TorchFSDPPlugin
    options: ClassVar = {"unit_min_numel": 1}


@slow_cases(
    "test_equals_one_process[sgd]",
    "test_equals_one_process[adafactor]",
    "test_equals_one_process[muon]",
    "test_loop_equals_one_process[evaluation between]",
    "test_low_precision_equals_one_process[fp16]",
    "test_resumed_run_continues_exactly",
)
class TestTwoReplicas(VariantConformance):
    plugin_class = TorchFSDPPlugin
    options: ClassVar = {"replica_size": 2, "unit_classes": ["Linear", "LayerNorm"]}
    world_size = 4
    other_world_size = 2
