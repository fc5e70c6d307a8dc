"""A model is boosted once: a second `boost` of the user's own model raises, and says what works instead."""

import copy
import gc

import pytest
import torch
from matrix import matrix
from named_plugins import NAMES, make_model, plugin_named
from ranked import on_ranks, raises_on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.training import whole_model

ALREADY = r"This `LlamaForCausalLM` is already boosted.*`booster.save_model`.*`booster.load_model`"


def num_ranks(name):
    return 1 if name == "single" else 2


def optimizer_of(model, kind=torch.optim.SGD):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind(trained, lr=0.1) if trained else None


@matrix(1, name=NAMES, **{"is_frozen, drops": [(False, False), (True, False), (False, True)]})
@raises_on_ranks(ConfigError, ALREADY, num_ranks)
def test_a_second_boost_raises_on_every_rank(name, is_frozen, drops):
    model = make_model().requires_grad_(requires_grad=not is_frozen)
    boosted = Booster("cpu", plugin=plugin_named(name)).boost(model, optimizer_of(model))
    if drops:
        del boosted
        gc.collect()
    Booster("cpu", plugin=plugin_named(name)).boost(model)


@on_ranks(2)
def test_another_plugin_notices_as_well():
    model = make_model()
    Booster("cpu", plugin="ddp").boost(model, optimizer_of(model))
    compiled = torch.compile(model, backend="eager")
    for plugin in ("fsdp", "zero", "gemini", "hybrid"):
        with pytest.raises(ConfigError, match=ALREADY):
            Booster("cpu", plugin=plugin).boost(model)
        with pytest.raises(ConfigError, match=ALREADY):
            Booster("cpu", plugin=plugin).boost(compiled)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@on_ranks(1)
def test_a_model_that_was_given_adapters_since_is_boosted_still():
    peft = pytest.importorskip("peft")
    model = make_model()
    Booster("cpu").boost(model, optimizer_of(model))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="is already boosted"):
        Booster("cpu").boost(adapted, optimizer_of(adapted))


@matrix(["fsdp", "hybrid-tp"], name=NAMES)
@on_ranks(num_ranks)
def test_a_copy_made_before_may_be_boosted(name):
    """Boost copies made before and after, and return the values of all three."""
    model = make_model()
    before = copy.deepcopy(model)
    found = []
    for each in (model, before):
        booster = Booster("cpu", plugin=plugin_named(name))
        boosted, *_ = booster.boost(each, optimizer_of(each))
        found.append(whole_model(booster, boosted))
    first, second = found
    assert_same_tensors(second, first, EXACT)


def ThreeReplicas():  # noqa: N802 - as the class that it stands for
    from booster_zero import LowLevelZeroPlugin

    return LowLevelZeroPlugin(replica_size=3)


@on_ranks(2)
def test_a_model_whose_boost_raised_may_be_boosted():
    model = make_model()
    with pytest.raises(ConfigError, match="does not divide"):
        Booster("cpu", plugin=ThreeReplicas()).boost(model, optimizer_of(model))
    Booster("cpu", plugin="ddp").boost(model, optimizer_of(model))
