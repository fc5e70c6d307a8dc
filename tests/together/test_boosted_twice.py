"""A model is boosted once: a second `boost` of the user's own model raises, and says what works instead."""

import copy
import gc

import pytest
import torch
from matrix import matrix
from named_plugins import NAMES, make_model, plugin_named

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.training import whole_model

ALREADY = r"This `LlamaForCausalLM` is already boosted.*`booster.save_model`.*`booster.load_model`"


def num_ranks(name):
    return 1 if name == "single" else 2


def optimizer_of(model, kind=torch.optim.SGD):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind(trained, lr=0.1) if trained else None


def twice(name, is_frozen, drops):
    model = make_model().requires_grad_(requires_grad=not is_frozen)
    boosted = Booster("cpu", plugin=plugin_named(name)).boost(model, optimizer_of(model))
    if drops:
        del boosted
        gc.collect()
    Booster("cpu", plugin=plugin_named(name)).boost(model)


@matrix(1, name=NAMES, **{"is_frozen, drops": [(False, False), (True, False), (False, True)]})
def test_a_second_boost_raises_on_every_rank(name, is_frozen, drops):
    expect_on_ranks(ConfigError, ALREADY, twice, num_ranks(name), name, is_frozen, drops)


def by_another_plugin():
    model = make_model()
    Booster("cpu", plugin="ddp").boost(model, optimizer_of(model))
    compiled = torch.compile(model, backend="eager")
    for plugin in ("fsdp", "zero", "gemini", "hybrid"):
        with pytest.raises(ConfigError, match=ALREADY):
            Booster("cpu", plugin=plugin).boost(model)
        with pytest.raises(ConfigError, match=ALREADY):
            Booster("cpu", plugin=plugin).boost(compiled)


def test_another_plugin_notices_as_well():
    run_on_ranks(by_another_plugin, 2)


def with_adapters():
    peft = pytest.importorskip("peft")
    model = make_model()
    Booster("cpu").boost(model, optimizer_of(model))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="is already boosted"):
        Booster("cpu").boost(adapted, optimizer_of(adapted))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_that_was_given_adapters_since_is_boosted_still():
    run_on_ranks(with_adapters, 1)


def copies(name):
    """Boost copies made before and after, and return the values of all three."""
    model = make_model()
    before = copy.deepcopy(model)
    found = []
    for each in (model, before):
        booster = Booster("cpu", plugin=plugin_named(name))
        boosted, *_ = booster.boost(each, optimizer_of(each))
        found.append(whole_model(booster, boosted))
    return found


@matrix(["fsdp", "hybrid-tp"], name=NAMES)
def test_a_copy_made_before_may_be_boosted(name):
    for first, second in run_on_ranks(copies, num_ranks(name), name):
        assert_same_tensors(second, first, EXACT)


def boost_after_an_error():
    model = make_model()
    with pytest.raises(ConfigError, match="does not divide"):
        Booster("cpu", plugin=ThreeReplicas()).boost(model, optimizer_of(model))
    Booster("cpu", plugin="ddp").boost(model, optimizer_of(model))


def ThreeReplicas():  # noqa: N802 - as the class that it stands for
    from booster_zero import LowLevelZeroPlugin

    return LowLevelZeroPlugin(replica_size=3)


def test_a_model_whose_boost_raised_may_be_boosted():
    run_on_ranks(boost_after_an_error, 2)
