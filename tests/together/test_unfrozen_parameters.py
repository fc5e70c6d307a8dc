"""Parameters that are unfrozen after `boost` and that no optimizer steps: an error on every rank, not silence."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise, train_boosted
from matrix import matrix
from residual_stack import SPLIT, Stack
from safetensors.torch import load_file

from booster_core import Booster
from booster_core.errors import GradientError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

PLUGINS = [None, "ddp", "fsdp", "zero", "gemini", "hybrid"]
WORLD_SIZES = {None: 1}


def step(booster, model, optimizer, inputs) -> None:
    output = model(**inputs)
    booster.backward(output.loss if hasattr(output, "loss") else output.square().sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


OF_STAGES = {"pp_size": 2, "custom_policy": SPLIT, "example_batch": torch.ones(2, 8)}
SETTINGS = {
    "single": Setting(SingleDeviceStrategy, num_ranks=1),
    "ddp": Setting(TorchDDPPlugin),
    "fsdp": Setting(TorchFSDPPlugin),
    "fsdp, units": Setting(TorchFSDPPlugin, {"unit_classes": ["Linear"]}),
    "fsdp, one replicated": Setting(TorchFSDPPlugin, {"ignored_modules": ["layers.0"]}),
    "zero": Setting(LowLevelZeroPlugin),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 256}),
    "hybrid": Setting(HybridParallelPlugin, {"tp_size": 1, "pp_size": 1}),
    "hybrid zero": Setting(HybridParallelPlugin, {"tp_size": 1, "pp_size": 1, "zero_stage": 1}),
    "hybrid zero3": Setting(HybridParallelPlugin, {"zero_stage": 3}),
    "tp": Setting(HybridParallelPlugin, {"tp_size": 2, "custom_policy": SPLIT}),
    "pp": Setting(HybridParallelPlugin, OF_STAGES),
    "pp-zero": Setting(HybridParallelPlugin, {**OF_STAGES, "zero_stage": 2}, 4),
    "tp-zero": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1, "custom_policy": SPLIT}, 4),
    "tp-zero3": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 3, "custom_policy": SPLIT}, 4),
}


def frozen_of(model):
    """Return the parameters of two layers, one on each of two stages."""
    return [*model.layers[0].parameters(), *model.layers[3].parameters()]


def frozen_stack():
    model = Stack()
    for parameter in frozen_of(model):
        parameter.requires_grad_(False)
    return model


def over(how, model):
    held = model.parameters() if how == "listed" else [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(held, lr=0.01)


def unfreeze(how, step, model, optimizer):
    if step == 2:
        for parameter in frozen_of(model):
            parameter.requires_grad_(True)
        if how == "added":
            optimizer.add_param_group({"params": frozen_of(model)})


def unfreezing(how):
    hooks = {"optimizer": partial(over, how), "before_step": partial(unfreeze, how)}
    return Case(build=frozen_stack, batch=noise(4, 8), steps=4, **hooks)


@matrix(1, mesh=SETTINGS, how=["listed", "added"])
def test_parameters_that_the_optimizer_holds_train_once_they_are_unfrozen(mesh, how) -> None:
    assert_equals_one_process(unfreezing(how), SETTINGS[mesh])


IN_BF16 = {"fsdp, units", "fsdp, one replicated", "zero", "gemini", "hybrid zero3", "tp"}


@matrix(
    [f"{'bf16' if mesh in IN_BF16 else 'fp32'}-{mesh}" for mesh in SETTINGS],
    precision=["fp32", "bf16"],
    mesh=SETTINGS,
)
def test_parameters_that_no_optimizer_holds_raise_once_they_are_unfrozen(mesh, precision) -> None:
    match = r"Parameter 'layers\.[03]\.(up|down)\..*' got a gradient, but it was frozen at `boost`.*add_param_group"
    if not mesh.startswith(("zero", "gemini", "hybrid", "tp", "pp")):
        match = r"8 parameters that were frozen at `boost` require gradients now, such as 'layers\."
    setting = replace(SETTINGS[mesh], precision=precision)
    expect_on_ranks(GradientError, match, train_boosted, setting.num_ranks, unfreezing("left out"), setting)


def set_second_adapter(plugin, folder) -> None:
    from peft import LoraConfig

    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["q_proj"])
    booster = Booster(plugin=plugin)
    model = booster.enable_lora(tiny_llama(), lora_config=config)
    model.add_adapter("second", config)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    for adapter in ("default", "second", "default"):
        boosted.unwrap().set_adapter(adapter)
        step(booster, boosted, optimizer, {"input_ids": tokens, "labels": tokens})
    booster.save_lora_as_pretrained(boosted, folder)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@matrix(["zero", "fsdp"], plugin=PLUGINS)
def test_an_adapter_that_was_frozen_at_boost_trains_once_it_is_set(plugin, tmp_path) -> None:
    """The optimizer listed it, as most scripts list `model.parameters()`."""
    pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    run_on_ranks(set_second_adapter, 1, None, str(tmp_path / "plain"))
    run_on_ranks(set_second_adapter, WORLD_SIZES.get(plugin, 2), plugin, str(tmp_path / "boosted"))
    for name in ("adapter_model.safetensors", "second/adapter_model.safetensors"):
        expected, found = (load_file(tmp_path / run / name) for run in ("plain", "boosted"))
        assert all(tensor.any() for tensor in expected.values()), "it was trained"
        assert_same_tensors(found, expected, tolerance_for(torch.float32))
