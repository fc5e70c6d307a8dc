"""Checkpoints of every mesh load on one device, and those of one device on every mesh."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from matrix import matrix
from mesh_steps import norms_on_ranks, step_once
from model_zoo import get_model
from safetensors.torch import load_file

from booster_core import Booster, discovery

NAME = "transformers/llama_tied"
SAMPLES = 4
RUNS = {
    "tp2pp2": ("hybrid", {"tp_size": 2, "pp_size": 2}, 4),
    "pp2dp2zero1": ("hybrid", {"pp_size": 2, "zero_stage": 1}, 4),
    "pp2dp2zero2": ("hybrid", {"pp_size": 2, "zero_stage": 2}, 4),
    "tp2dp2zero3": ("hybrid", {"tp_size": 2, "zero_stage": 3}, 4),
    "pp2dp2zero3": ("hybrid", {"pp_size": 2, "zero_stage": 3}, 4),
    "pp4": ("hybrid", {"pp_size": 4}, 4),
    "zbv": ("hybrid", {"pp_size": 2, "pp_style": "zbv"}, 2),
    "tp4": ("hybrid", {"tp_size": 4}, 4),
    "one device": (None, {}, 1),
    "zero2 x3": ("zero", {"stage": 2, "bucket_bytes": 1024}, 3),
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=4, tie_word_embeddings=True, **sizes))


def boosted(run, precision=None, *, shift=0.0):
    plugin, options, _ = RUNS[run]
    made = None if plugin is None else discovery.load(plugin)(**options)
    booster = Booster(plugin=made, mixed_precision=precision)
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shift)
    decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}], lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def batch_of(step):
    return {key: value % 64 for key, value in get_model(NAME).share(step, 0, SAMPLES).items()}


def save(run, folder, precision=None):
    booster, model, optimizer = boosted(run, precision)
    for step in range(2):
        step_once(booster, model, optimizer, batch_of(step))
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    return [step_once(booster, model, optimizer, batch_of(step)) for step in (2, 3, 4)]


def load(run, folder, precision=None):
    booster, model, optimizer = boosted(run, precision, shift=0.5)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    booster.save_model(model, folder / "again" / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "again" / "optimizer", shard=True)
    return [step_once(booster, model, optimizer, batch_of(step)) for step in (2, 3, 4)]


def tensors_in(folder):
    """Return all tensors of a folder by name, read by safetensors alone."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


ONE = "one device"
MESHES = ["tp2pp2", "pp2dp2zero1", "pp2dp2zero2", "tp2dp2zero3", "pp4", "zbv", "tp4"]
MESHES += [pytest.param("pp2dp2zero3", marks=pytest.mark.slow)]


def assert_resumes(saved, loaded, folder):
    assert_goes_on(norms_on_ranks(save, RUNS[saved][2], saved, folder), loaded, folder)


def assert_goes_on(expected, loaded, folder):
    assert norms_on_ranks(load, RUNS[loaded][2], loaded, folder) == pytest.approx(expected, rel=1e-4)
    for part in ("model", "optimizer"):
        before, after = tensors_in(folder / part), tensors_in(folder / "again" / part)
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    groups = [json.loads((each / "optimizer/param_groups.json").read_text()) for each in (folder, folder / "again")]
    assert groups[0] == groups[1]


@matrix(["tp2dp2zero3", "zbv"], run=MESHES)
def test_checkpoint_of_a_mesh_resumes_on_one_device(run, tmp_path):
    assert_resumes(run, ONE, tmp_path)


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory):
    """The folder of a run on one device, and the norms that it went on with."""
    folder = tmp_path_factory.mktemp("one")
    return folder, norms_on_ranks(save, RUNS[ONE][2], ONE, folder)


@matrix(["tp2dp2zero3", "zbv"], run=MESHES)
def test_checkpoint_of_one_device_resumes_on_a_mesh(run, of_one_device, tmp_path):
    folder, expected = of_one_device
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    assert_goes_on(expected, run, tmp_path)
