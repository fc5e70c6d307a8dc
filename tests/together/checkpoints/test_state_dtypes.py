"""Optimizer state of another type than its parameter's is that of the undisturbed run after a load."""

import pytest
import torch
from cases import Case, Setting, noise, train_boosted
from own_optimizers import OtherMomentum
from ranked import on_ranks

from booster_core.plugin.single import SingleDevicePlugin
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.models import TinyMLP
from booster_zero import LowLevelZeroPlugin

SETTINGS = {
    "one device": Setting(SingleDevicePlugin, {}, 1),
    "ddp": Setting(TorchDDPPlugin),
    "zero": Setting(LowLevelZeroPlugin, {"stage": 2, "partition": "flat"}),
    "gemini": Setting(GeminiPlugin, {"partition": "flat"}),
    "fsdp": Setting(TorchFSDPPlugin),
    "hybrid": Setting(HybridParallelPlugin, {"tp_size": 1}),
}


def build(dtype):
    torch.manual_seed(0)
    return TinyMLP().to(dtype)


def with_other_momentum(model):
    return OtherMomentum(model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(lambda name: SETTINGS[name].num_ranks)
def test_momentum_of_another_type_is_that_of_the_undisturbed_run(name, dtype, tmp_path):
    case = Case(
        build=lambda: build(dtype), batch=noise(4, 8, dtype=dtype), optimizer=with_other_momentum, max_norm=None
    )
    undisturbed = train_boosted(case, SETTINGS[name])
    resumed = train_boosted(case, SETTINGS[name], checkpoint=tmp_path)
    assert resumed.trained.parameters.keys() == undisturbed.trained.parameters.keys()
    for each, values in undisturbed.trained.parameters.items():
        assert torch.equal(resumed.trained.parameters[each], values), each
