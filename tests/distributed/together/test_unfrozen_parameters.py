"""Parameters that are unfrozen after `boost` and that no optimizer steps: an error on every rank, not silence."""

import pytest
import torch

from booster_core import Booster
from booster_core.errors import GradientError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks
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


def boost_frozen(plugin, *, lists_all=False):
    torch.manual_seed(3)
    model = TinyMLP()
    model.first.requires_grad_(False)
    booster = Booster(plugin=plugin)
    parameters = model.parameters() if lists_all else model.second.parameters()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(parameters, lr=0.1))
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


def test_a_listed_parameter_trains_when_it_is_unfrozen() -> None:
    booster, boosted, optimizer, inputs = boost_frozen(None, lists_all=True)
    first = boosted.unwrap().first
    before = first.weight.detach().clone()
    step(booster, boosted, optimizer, inputs)
    assert torch.equal(first.weight, before)
    first.requires_grad_(True)
    step(booster, boosted, optimizer, inputs)
    assert not torch.equal(first.weight, before)


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
@pytest.mark.parametrize("plugin", PLUGINS)
def test_another_adapter_that_is_set_after_boost_raises(plugin) -> None:
    pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
    match = r"4 parameters that were frozen at `boost`.*lora_A\.second|parameter\(s\) (that were frozen|took part)"
    if plugin in AT_THE_GRADIENT:
        match = r"Parameter '.*\.lora_[AB]\.second\.weight' got a gradient, but it was frozen at `boost`"
    expect_on_ranks(GradientError, match, set_second_adapter, WORLD_SIZES.get(plugin, 2), plugin)
