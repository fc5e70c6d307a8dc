"""Parameters that are unfrozen after `boost` and that no optimizer steps: an error on every rank, not silence."""

import pytest
import torch
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import GradientError
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import TinyMLP, tiny_llama
from booster_testing.training import whole_model

PLUGINS = [None, "ddp", "fsdp", "zero", "gemini", "hybrid"]
WORLD_SIZES = {None: 1}
AT_THE_GRADIENT = {"zero", "gemini", "hybrid"}
"""Strategies that tell before the step, of the first parameter that gets a gradient."""


def step(booster, model, optimizer, inputs) -> None:
    output = model(**inputs)
    booster.backward(output.loss if hasattr(output, "loss") else output.square().sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def boost_frozen(plugin):
    torch.manual_seed(3)
    model = TinyMLP()
    model.first.requires_grad_(False)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.second.parameters(), lr=0.1))
    inputs = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(DistCoordinator().rank))}
    return booster, boosted, optimizer, inputs


def unfreeze_base(plugin) -> None:
    booster, boosted, optimizer, inputs = boost_frozen(plugin)
    step(booster, boosted, optimizer, inputs)
    boosted.unwrap().first.requires_grad_(True)
    step(booster, boosted, optimizer, inputs)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_unfreezing_what_the_optimizer_does_not_step_raises(plugin) -> None:
    match = r"2 parameters that were frozen at `boost`.*such as 'first\.bias'|2 parameter\(s\) that were frozen"
    if plugin in AT_THE_GRADIENT:
        match = r"Parameter 'first\.(weight|bias)' got a gradient, but it was frozen at `boost`"
    expect_on_ranks(GradientError, match, unfreeze_base, WORLD_SIZES.get(plugin, 2), plugin)


def freeze_again(plugin):
    booster, boosted, optimizer, inputs = boost_frozen(plugin)
    before = whole_model(booster, boosted)
    boosted.unwrap().first.requires_grad_(True).requires_grad_(False)
    step(booster, boosted, optimizer, inputs)
    after = whole_model(booster, boosted)
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_is_frozen_again_trains_the_rest(plugin) -> None:
    for changed in run_on_ranks(freeze_again, WORLD_SIZES.get(plugin, 2), plugin):
        assert changed == {"second.weight", "second.bias"}


def test_a_parameter_group_that_is_added_later_trains() -> None:
    booster, boosted, optimizer, inputs = boost_frozen(None)
    first = boosted.unwrap().first.requires_grad_(True)
    before = first.weight.detach().clone()
    optimizer.add_param_group({"params": list(first.parameters())})
    step(booster, boosted, optimizer, inputs)
    assert not torch.equal(first.weight, before)


SPLIT = ShardingPolicy(
    rules=(ModuleRule("layers.*.up", Style.COLUMN), ModuleRule("layers.*.down", Style.ROW)), layers=("layers",)
)
MESHES = {
    "single": SingleDeviceStrategy,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "tp": lambda: HybridParallelPlugin(tp_size=2, custom_policy=SPLIT),
    "pp": lambda: HybridParallelPlugin(pp_size=2, custom_policy=SPLIT, example_batch=torch.ones(2, 8)),
    "pp-zero": lambda: HybridParallelPlugin(
        pp_size=2, zero_stage=2, custom_policy=SPLIT, example_batch=torch.ones(2, 8)
    ),
    "tp-zero": lambda: HybridParallelPlugin(tp_size=2, zero_stage=1, custom_policy=SPLIT),
    "tp-zero3": lambda: HybridParallelPlugin(tp_size=2, zero_stage=3, custom_policy=SPLIT),
}
"""Strategies and meshes besides those of `test_gradients_without_optimizer`, which tests ZeRO's kin."""
MESH_SIZES = {"single": 1, "pp-zero": 4, "tp-zero": 4, "tp-zero3": 4}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def frozen_stack(how):
    """Return a model of which two layers are frozen, one on each of two stages, and an optimizer."""
    torch.manual_seed(3)
    model = Stack()
    frozen = [*model.layers[0].parameters(), *model.layers[3].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    held = list(model.parameters()) if how == "listed" else [p for p in model.parameters() if p.requires_grad]
    return model, frozen, torch.optim.Adam(held, lr=0.01)


def rows(step, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + replica))


def squared(outputs, _):
    return outputs.square().mean()


def plainly(how, num_replicas):
    model, frozen, optimizer = frozen_stack(how)
    for step in range(4):
        if step == 2:
            unfreeze(frozen, optimizer, how)
        for replica in range(num_replicas):
            (squared(model(rows(step, replica)), None) / num_replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def unfreeze(frozen, optimizer, how):
    for parameter in frozen:
        parameter.requires_grad_(True)
    if how == "added":
        optimizer.add_param_group({"params": frozen})


def unfreeze_on(mesh, how):
    model, frozen, optimizer = frozen_stack(how)
    booster = Booster("cpu", plugin=MESHES[mesh]())
    model, optimizer, *_ = booster.boost(model, optimizer)
    replica, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    inner = model.unwrap()
    frozen = [*inner.layers[0].parameters(), *inner.layers[3].parameters()]
    for step in range(4):
        if step == 2:
            unfreeze(frozen, optimizer, how)
        if mesh.startswith("pp"):
            booster.execute_pipeline(iter([rows(step, replica)]), model, squared, optimizer)
        else:
            booster.backward(squared(model(rows(step, replica)), None), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(booster, model)


@matrix(1, mesh=MESHES, how=["listed", "added"])
def test_parameters_that_the_optimizer_holds_train_once_they_are_unfrozen(mesh, how) -> None:
    num_replicas = 1 if mesh in ("single", "tp", "pp") else 2
    expected = plainly(how, num_replicas)
    for found in run_on_ranks(unfreeze_on, MESH_SIZES.get(mesh, 2), mesh, how):
        assert_same_tensors(found, expected, tolerance_for(torch.float32))


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_that_no_optimizer_holds_raise_once_they_are_unfrozen(mesh) -> None:
    match = r"frozen at `boost`|that were frozen"
    expect_on_ranks(GradientError, match, unfreeze_on, MESH_SIZES.get(mesh, 2), mesh, "left out")


def set_second_adapter(plugin) -> None:
    from peft import LoraConfig

    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["q_proj"])
    booster = Booster(plugin=plugin)
    model = booster.enable_lora(tiny_llama(), lora_config=config)
    model.add_adapter("second", config)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(DistCoordinator().rank))
    step(booster, boosted, optimizer, {"input_ids": tokens, "labels": tokens})
    boosted.unwrap().set_adapter("second")
    step(booster, boosted, optimizer, {"input_ids": tokens, "labels": tokens})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@matrix(["zero"], plugin=PLUGINS)
def test_another_adapter_that_is_set_after_boost_raises(plugin) -> None:
    pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    match = r"4 parameters that were frozen at `boost`.*lora_A\.second|parameter\(s\) (that were frozen|took part)"
    if plugin in AT_THE_GRADIENT:
        match = r"Parameter '.*\.lora_[AB]\.second\.weight' got a gradient, but it was frozen at `boost`"
    expect_on_ranks(GradientError, match, set_second_adapter, WORLD_SIZES.get(plugin, 2), plugin)
