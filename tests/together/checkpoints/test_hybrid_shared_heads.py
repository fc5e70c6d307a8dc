"""Checkpoints of models whose key/value heads lie on several tensor parallel ranks, with adapters and without."""

from __future__ import annotations

import pytest
import torch
from matrix import matrix
from mesh_steps import norms_on_ranks, step_once

from booster_core import Booster, discovery
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

RUNS = {
    "alone": ("ddp", {}, 1),
    "tp2": ("hybrid", {"tp_size": 2}, 2),
    "tp3": ("hybrid", {"tp_size": 3}, 3),
    "tp4": ("hybrid", {"tp_size": 4}, 4),
    "tp2pp2": ("hybrid", {"tp_size": 2, "pp_size": 2}, 4),
    "tp2dp2zero1": ("hybrid", {"tp_size": 2, "zero_stage": 1}, 4),
}
ADAPTERS = {
    "r": 4,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
    "init_lora_weights": False,
}
LENGTH, SAMPLES = 8, 4


def llama():
    """Return a model with four query heads and two of keys and values: four ranks hold each of the latter twice."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))


def batch_of(step):
    tokens = torch.randint(64, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def boosted(run, *, adapters, shift=0.0, folder=None, **changes):
    plugin, options, _ = RUNS[run]
    booster = Booster(plugin=discovery.load(plugin)(**options))
    model = llama()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        if folder is not None:
            model = booster.enable_lora(model, pretrained_dir=folder)
        elif adapters:
            model = booster.enable_lora(model, lora_config=peft.LoraConfig(**{**ADAPTERS, **changes}))
        for parameter in model.parameters():
            parameter.add_(shift)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The epsilon is above most gradients, so that rounding errors of tiny ones stay tiny in the parameters.
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained, lr=1e-2, eps=1e-3))
    return booster, model, optimizer


def save(run, folder, adapters):
    booster, model, optimizer = boosted(run, adapters=adapters)
    for step in range(2):
        step_once(booster, model, optimizer, batch_of(step))
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    return [step_once(booster, model, optimizer, batch_of(step)) for step in (2, 3, 4)]


def load(run, folder, adapters):
    booster, model, optimizer = boosted(run, adapters=adapters, shift=0.5)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    return [step_once(booster, model, optimizer, batch_of(step)) for step in (2, 3, 4)]


PAIRS = [pair for run in RUNS if run != "alone" for pair in ((run, "alone"), ("alone", run))]
DEFAULT = {(False, "tp4", "alone"), (False, "alone", "tp4"), (False, "alone", "tp3"), (True, "tp4", "alone")}
DEFAULT |= {(True, "tp2pp2", "alone")}


def cases():
    for adapters in (False, True):
        for saved, loaded in PAIRS:
            marks = [] if (adapters, saved, loaded) in DEFAULT else [pytest.mark.slow]
            name = f"{'adapters' if adapters else 'plain'}-{saved}-{loaded}"
            yield pytest.param(adapters, saved, loaded, marks=marks, id=name)


@matrix(["plain-alone-tp4"], **{"adapters, saved, loaded": list(cases())})
def test_a_run_resumes_with_another_split_of_the_heads(adapters, saved, loaded, tmp_path):
    expected = norms_on_ranks(save, RUNS[saved][2], saved, tmp_path, adapters)
    assert norms_on_ranks(load, RUNS[loaded][2], loaded, tmp_path, adapters) == pytest.approx(expected, rel=1e-4)


def trained_parameters(run):
    booster, model, optimizer = boosted(run, adapters=False)
    for step in range(2):
        step_once(booster, model, optimizer, batch_of(step))
    return whole_model(booster, model)


def test_a_model_with_shared_heads_is_one_of_transformers(tmp_path):
    norms_on_ranks(save, RUNS["tp4"][2], "tp4", tmp_path, False)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    expected = run_on_ranks(trained_parameters, 1, "alone")[0]
    found = {name: parameter.detach() for name, parameter in loaded.named_parameters()}
    assert_same_tensors(found, expected, tolerance_for(torch.float32))


def load_pretrained(run, folder, adapters):
    booster, model, _ = boosted(run, adapters=adapters, shift=0.5)
    booster.load_model(model, folder, strict=not adapters)
    return whole_model(booster, model)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_pretrained_folder_loads_into_shared_heads(adapters, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    expected = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for found in run_on_ranks(load_pretrained, 4, "tp4", tmp_path, adapters):
        assert_same_tensors({name: found[name] for name in expected}, expected, EXACT)


def save_adapters(run, folder):
    booster, model, optimizer = boosted(run, adapters=True)
    for step in range(2):
        step_once(booster, model, optimizer, batch_of(step))
    booster.save_lora_as_pretrained(model, folder)
    if getattr(model, "engine", None) is not None:
        return None
    with torch.no_grad():
        return model(input_ids=batch_of(9)["input_ids"]).logits


def load_adapters(run, folder):
    booster, model, _ = boosted(run, adapters=True, folder=folder)
    with torch.no_grad():
        return model(input_ids=batch_of(9)["input_ids"]).logits, whole_model(booster, model)


@matrix(
    ["tp3"],
    run=["tp4", "tp3", pytest.param("tp2dp2zero1", marks=pytest.mark.slow), "tp2pp2"],
)
def test_adapters_of_split_layers_load_in_stock_peft_with_equal_logits(run, tmp_path):
    ours = run_on_ranks(save_adapters, RUNS[run][2], run, tmp_path)[0]
    loaded = peft.PeftModel.from_pretrained(llama(), str(tmp_path))
    with torch.no_grad():
        logits = loaded(input_ids=batch_of(9)["input_ids"]).logits
    if ours is None:
        ours = run_on_ranks(save_adapters, 1, "alone", tmp_path / "alone")[0]
    assert_same_tensors({"logits": ours}, {"logits": logits}, tolerance_for(torch.float32))
    again, held = run_on_ranks(load_adapters, 2, "tp2", tmp_path)[0]
    assert_same_tensors({"logits": again}, {"logits": logits}, tolerance_for(torch.float32))
    expected = {
        name.removeprefix("base_model.model."): parameter.detach()
        for name, parameter in loaded.named_parameters()
        if "lora_" in name
    }
    assert_same_tensors({name: held[name] for name in expected}, expected, EXACT)
