"""What rules call the modules of a model with adapters."""

from __future__ import annotations

import pytest
from torch import nn

from booster_hybrid.modules import ModuleNames
from booster_testing.models import tiny_llama

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # Version 0.21 of peft reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def adapted(**config):
    config = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "mlp"], **config}
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, **config))


def test_names_are_those_of_the_model_without_adapters():
    names = ModuleNames(adapted().get_base_model())
    copies = {name for name in names.modules if "modules_to_save" in name}
    assert names.modules.keys() - copies == {name for name, _ in tiny_llama().named_modules()}
    plain = {name for name, _ in tiny_llama().named_parameters()}
    assert {name for name in names.parameters if "modules_to_save" not in name} == plain


def test_a_layer_inside_of_its_adapters_is_found_by_their_name():
    names = ModuleNames(adapted().get_base_model())
    name = "model.layers.0.self_attn.q_proj"
    assert type(names.modules[name]) is nn.Linear
    assert names.outermost[name] is names.adapted[name]
    assert names.adapted[name].base_layer is names.modules[name]
    assert names.parent(name) is names.modules["model.layers.0.self_attn"]


@pytest.mark.parametrize(
    ("own", "in_rules"),
    [
        ("lm_head.modules_to_save.default", "lm_head"),
        ("lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("model.layers.1.mlp.modules_to_save.default.up_proj", "model.layers.1.mlp.up_proj"),
        ("model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.v_proj"),
    ],
)
def test_rules_match_a_copy_by_the_name_of_its_original(own, in_rules):
    names = ModuleNames(adapted().get_base_model())
    assert own in names.modules or own in names.parameters
    assert names.in_rules(own) == in_rules


def test_a_copy_has_the_parent_of_its_original():
    model = adapted().get_base_model()
    names = ModuleNames(model)
    assert names.parent("lm_head.modules_to_save.default") is model
    copied = "model.layers.0.mlp.modules_to_save.default"
    assert names.parent(f"{copied}.up_proj") is names.modules[copied]


def test_adapter_parameters_have_names_and_match_no_rule():
    model = adapted()
    names = ModuleNames(model.get_base_model())
    path = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    own = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert names.names_of[id(model.get_parameter(path))] == [own]
    assert own not in names.parameters
    assert own.rpartition(".")[0] not in names.modules


def test_user_modules_named_like_adapters_are_kept():
    model = nn.ModuleDict({"lora_A": nn.Linear(2, 2), "modules_to_save": nn.ModuleDict({"up": nn.Linear(2, 2)})})
    names = ModuleNames(model)
    assert set(names.modules) == {"", "lora_A", "modules_to_save", "modules_to_save.up"}
    assert names.in_rules("modules_to_save.up") == "modules_to_save.up"
