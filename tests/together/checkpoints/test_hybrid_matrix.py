"""Checkpoints of every mesh load on one device, and those of one device on every mesh.

So do those of models whose key/value heads lie on several tensor parallel ranks, with adapters and without.
"""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
import torch
from cases import Setting
from matrix import matrix
from safetensors.torch import load_file

from booster_hybrid import HybridParallelPlugin
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = pytest.mark.filterwarnings(
    # Where a test calls peft itself: version 0.21 reads an attribute that transformers 5.23 has renamed.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def mesh(num_ranks=4, **options):
    return Setting(HybridParallelPlugin, options, num_ranks)


ONE = "alone"
RUNS = {
    ONE: Setting(SingleDeviceStrategy, num_ranks=1),
    "tp2": mesh(2, tp_size=2),
    "tp3": mesh(3, tp_size=3),
    "tp4": mesh(tp_size=4),
    "tp2pp2": mesh(tp_size=2, pp_size=2),
    "tp2dp2zero1": mesh(tp_size=2, zero_stage=1),
    "tp2dp2zero3": mesh(tp_size=2, zero_stage=3),
    "pp2dp2zero1": mesh(pp_size=2, zero_stage=1),
    "pp2dp2zero2": mesh(pp_size=2, zero_stage=2),
    "pp2dp2zero3": mesh(pp_size=2, zero_stage=3),
    "pp4": mesh(pp_size=4),
    "zbv": mesh(2, pp_size=2, pp_style="zbv"),
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
CASES = [("tied", run) for run in TIED]
CASES += [(model, run) for model in ("shared heads", "adapters") for run in SHARED]


def llama(model):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **MODELS[model]))


def batch_of(number):
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


def boosted(name, run, *, shift=0.0, folder=None):
    booster, model = RUNS[run].make_booster(), llama(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        if folder is not None:
            model = booster.enable_lora(model, pretrained_dir=folder)
        elif name == "adapters":
            model = booster.enable_lora(model, lora_config=peft.LoraConfig(**ADAPTERS))
        for parameter in model.parameters():
            parameter.add_(shift)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([each for each in trained if (each.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}]
    groups += [{"params": vectors, "lr": 2e-2}] if vectors else []
    # The epsilon is above most gradients, so that rounding errors of tiny ones stay tiny in the parameters.
    return booster, *booster.boost(model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3))[:2]


def step_once(booster, model, optimizer, number):
    """Take a step, on the same four samples whatever the number of ranks, and return its gradients' norm."""
    batch = batch_of(number)
    if getattr(booster.plugin, "pp_size", 1) > 1:
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
    else:
        halves = [{key: value[start : start + 2] for key, value in batch.items()} for start in (0, 2)]
        for index, half in enumerate(halves):
            with booster.no_sync(model, optimizer) if index == 0 else contextlib.nullcontext():
                booster.backward(model(**half).loss / 2, optimizer)
    norm = float(optimizer.clip_grad_by_norm(0.5))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def train(run, numbers):
    return [step_once(*run, number) for number in numbers]


def save(name, run, folder):
    boosted_run = booster, model, optimizer = boosted(name, run)
    train(boosted_run, range(2))
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    return train(boosted_run, range(2, 5))


def load(name, run, folder):
    boosted_run = booster, model, optimizer = boosted(name, run, shift=0.5)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    booster.save_model(model, folder / "again" / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "again" / "optimizer", shard=True)
    return train(boosted_run, range(2, 5))


def on_ranks(function, name, run, *arguments):
    """Return the norms that all ranks agree on."""
    per_rank = run_on_ranks(function, RUNS[run].num_ranks, name, run, *arguments)
    assert all(norms == pytest.approx(per_rank[0], rel=1e-6) for norms in per_rank)
    return per_rank[0]


def tensors_in(folder):
    """Return all tensors of a folder by name, read by safetensors alone."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_goes_on(expected, name, run, folder):
    assert on_ranks(load, name, run, folder) == pytest.approx(expected, rel=1e-4)
    for part in ("model", "optimizer"):
        before, after = tensors_in(folder / part), tensors_in(folder / "again" / part)
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    groups = [json.loads((each / "optimizer/param_groups.json").read_text()) for each in (folder, folder / "again")]
    assert groups[0] == groups[1]


@matrix(
    ["tied-tp2dp2zero3", "tied-zbv", "shared heads-tp4", "adapters-tp4", "adapters-tp2pp2"], **{"model, run": CASES}
)
def test_checkpoint_of_a_mesh_resumes_on_one_device(model, run, tmp_path):
    assert_goes_on(on_ranks(save, model, run, tmp_path), model, ONE, tmp_path)


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory):
    """Return a function that returns the folder of a run on one device, and the norms that it went on with."""
    known = {}

    def saved(model):
        if model not in known:
            folder = tmp_path_factory.mktemp("one")
            known[model] = folder, on_ranks(save, model, ONE, folder)
        return known[model]

    return saved


@matrix(["tied-tp2dp2zero3", "tied-zbv", "shared heads-tp4", "shared heads-tp3"], **{"model, run": CASES})
def test_checkpoint_of_one_device_resumes_on_a_mesh(model, run, of_one_device, tmp_path):
    folder, expected = of_one_device(model)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert_goes_on(expected, model, run, tmp_path)


def save_adapters(run, folder):
    boosted_run = booster, model, _ = boosted("adapters", run)
    train(boosted_run, range(2))
    booster.save_lora_as_pretrained(model, folder)
    if getattr(booster.plugin, "pp_size", 1) > 1:
        return None
    with torch.no_grad():
        return model(input_ids=batch_of(9)["input_ids"]).logits


def load_adapters(folder):
    booster, model, _ = boosted("adapters", "tp2", folder=folder)
    with torch.no_grad():
        return model(input_ids=batch_of(9)["input_ids"]).logits, whole_model(booster, model)


@matrix(["tp3"], run=["tp4", "tp3", "tp2dp2zero1", "tp2pp2"])
def test_adapters_of_split_layers_load_in_stock_peft_with_equal_logits(run, tmp_path):
    ours = run_on_ranks(save_adapters, RUNS[run].num_ranks, run, tmp_path)[0]
    loaded = peft.PeftModel.from_pretrained(llama("adapters"), str(tmp_path))
    with torch.no_grad():
        logits = loaded(input_ids=batch_of(9)["input_ids"]).logits
    if ours is None:
        ours = run_on_ranks(save_adapters, 1, ONE, tmp_path / "alone")[0]
    assert_same_tensors({"logits": ours}, {"logits": logits}, tolerance_for(torch.float32))
    again, held = run_on_ranks(load_adapters, 2, tmp_path)[0]
    assert_same_tensors({"logits": again}, {"logits": logits}, tolerance_for(torch.float32))
    expected = {
        name.removeprefix("base_model.model."): parameter.detach()
        for name, parameter in loaded.named_parameters()
        if "lora_" in name
    }
    assert_same_tensors({name: held[name] for name in expected}, expected, EXACT)
