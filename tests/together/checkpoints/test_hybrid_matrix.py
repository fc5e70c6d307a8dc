"""What ranks that hold whole tensors have saved goes on on every mesh, and what every mesh has saved goes on on them.

So do models whose key/value heads lie on several tensor parallel ranks, with adapters, which peft loads, and without.
"""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, decayed, parameter_paths, train_plainly
from matrix import matrix

from booster_ddp import TorchDDPPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.compare import assert_same_tensors

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

MESHES = {
    "tp2": (2, {"tp_size": 2}),
    "tp3": (3, {"tp_size": 3}),
    "tp4": (4, {"tp_size": 4}),
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "tp2dp2zero1": (4, {"tp_size": 2, "zero_stage": 1}),
    "tp2dp2zero3": (4, {"tp_size": 2, "zero_stage": 3}),
    "pp2dp2zero1": (4, {"pp_size": 2, "zero_stage": 1}),
    "pp2dp2zero2": (4, {"pp_size": 2, "zero_stage": 2}),
    "pp2dp2zero3": (4, {"pp_size": 2, "zero_stage": 3}),
    "pp4": (4, {"pp_size": 4}),
    "zbv": (2, {"pp_size": 2, "pp_style": "zbv"}),
}
MODELS = {
    "tied": {"num_hidden_layers": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    # Of two heads of keys and values, four ranks hold each twice.
    "shared heads": {"num_hidden_layers": 2, "num_key_value_heads": 2},
    "adapters": {"num_hidden_layers": 2, "num_key_value_heads": 2},
}
ADAPTERS = {
    "r": 4,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
    "init_lora_weights": False,
}
TIED = ["tp2pp2", "pp2dp2zero1", "pp2dp2zero2", "tp2dp2zero3", "pp2dp2zero3", "pp4", "zbv", "tp4"]
SHARED = ["tp2", "tp3", "tp4", "tp2pp2", "tp2dp2zero1"]
CASES = [("tied", mesh) for mesh in TIED]
CASES += [(model, mesh) for model in ("shared heads", "adapters") for mesh in SHARED]


def llama(model):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **MODELS[model]))


def build(model):
    return peft.get_peft_model(llama(model), peft.LoraConfig(**ADAPTERS)) if model == "adapters" else llama(model)


def same_batch(number, _replica):
    """Return one batch for all, so that the number of data parallel ranks does not matter."""
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


def save_adapters(folder, booster, model, _optimizer):
    if hasattr(model, "peft_config"):
        booster.save_lora_as_pretrained(model, folder)


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "loads"])
@matrix(["tied-tp2dp2zero3", "tied-zbv", "shared heads-tp3", "adapters-tp4"], **{"model, mesh": CASES})
def test_a_mesh_goes_on_from_whole_tensors_and_they_from_a_mesh(model, mesh, saves, tmp_path):
    num_ranks, options = MESHES[mesh]
    settings = [Setting(HybridParallelPlugin, options, num_ranks), Setting(TorchDDPPlugin, {}, num_ranks)]
    first, then = settings if saves else settings[::-1]
    case = Case(build=partial(build, model), batch=same_batch, optimizer=decayed, steps=4)
    tell = partial(save_adapters, tmp_path / "lora")
    assert_equals_one_process(case, first, checkpoint=tmp_path / "run", then=then, tell=tell)
    if model == "adapters":
        loaded = peft.PeftModel.from_pretrained(llama(model), tmp_path / "lora", is_trainable=True)
        found = {name: loaded.get_parameter(path) for name, path in parameter_paths(loaded).items()}
        trained = {name: parameter.detach() for name, parameter in found.items() if parameter.requires_grad}
        expected = train_plainly(case, 1).parameters
        assert len(trained) == 25, "two for each of the layers, and the head"
        assert_same_tensors(trained, {name: expected[name] for name in trained}, case.tolerance)
