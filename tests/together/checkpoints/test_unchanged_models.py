"""What only reads a boosted model leaves it as it was: its modules, their classes and modes, and every tensor.

The model has what such calls trip over: a module with two names, tied weights, adapters and buffers of both kinds.
"""

import pytest
import torch
from named_plugins import NAMES, plugin_named
from plugin_runs import backward
from ranked import on_ranks

from booster_core import Booster
from booster_runtime import check_replicas, evaluate_batch, full_gradient, full_state
from booster_testing.models import tiny_llama

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
pytest.importorskip("transformers", reason="the model is transformers'")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TOKENS = torch.arange(32).view(4, 8) % 16


def boost(name, lora):
    torch.manual_seed(0)
    booster, model = Booster("cpu", plugin=plugin_named(name)), tiny_llama(tie_word_embeddings=True)
    model.again = model.model.layers[0].mlp  # a module with two names
    model.register_buffer("count", torch.zeros(3))
    model.register_buffer("passing", torch.zeros(3), persistent=False)
    if lora:
        model = booster.enable_lora(model, lora_config=peft.LoraConfig(r=2, **lora))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = {"input_ids": TOKENS.clone(), "labels": TOKENS.clone()}
    for step in range(2):  # the second one's gradients are at hand
        backward(booster, model, optimizer, batch)
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.unwrap().get_submodule("base_model" if lora else "model").eval()  # one part is in another mode
    return booster, model, optimizer, batch


def looks(model):
    """Return what must not change of a model: its modules, its tensors by every name that they have, and versions."""
    modules, tensors, versions = {}, {}, {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[name] = id(module), type(module).__name__, type(module), module.training
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                what = id(tensor), type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
                tensors[f"{name}.{key}"], versions[f"{name}.{key}"] = what, tensor._version
    return modules, tensors, versions


@pytest.mark.parametrize("lora", [{}, {"target_modules": ["q_proj"]}], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", NAMES)
@on_ranks(lambda name: 1 if name == "single" else 2)
def test_reading_changes_nothing(name, lora, tmp_path):
    booster, model, optimizer, batch = boost(name, lora)
    names = sorted(name for group in booster.state_adapter(model).param_groups() for name in group.params)
    names = booster.context.coordinator.all_gather_object(names)[0]
    objects = {"model": model, "optimizer": optimizer}

    def evaluate():
        if booster.plugin.name != "hybrid" or booster.plugin.config.pipeline.size == 1:
            model(**batch)
        evaluate_batch(booster, iter([batch]), model, lambda outputs, _: outputs.loss)

    calls = {
        "describe": booster.describe,
        "state_dict": model.state_dict,
        "save_model": lambda: booster.save_model(model, tmp_path / "model.safetensors"),
        "save_model of a folder": lambda: booster.save_model(model, tmp_path / "model", shard=True),
        "save_checkpoint": lambda: booster.save_checkpoint(tmp_path / "run", step=1, **objects),
        "save_pretrained": lambda: model.save_pretrained(tmp_path / "pretrained"),
        "full_gradient": lambda: [full_gradient(booster, model, name) for name in names],
        "full_state": lambda: full_state(booster, model, names[0], "exp_avg"),
        "check_replicas": lambda: check_replicas(booster, model),
        "evaluate_batch": evaluate,
    }
    if lora:
        calls["save_lora_as_pretrained"] = lambda: booster.save_lora_as_pretrained(model, tmp_path / "lora")
    for call, read in calls.items():
        before = looks(model.unwrap())
        read()
        assert looks(model.unwrap()) == before, call
    optimizer.step()  # and training goes on
    before = looks(model.unwrap())
    booster.load_model(model, tmp_path / "model.safetensors")
    booster.load_checkpoint(tmp_path / "run", **objects)
    assert looks(model.unwrap())[:2] == before[:2]
