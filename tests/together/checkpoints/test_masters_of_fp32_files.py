"""A run with fp32 masters keeps every digit of fp32 values that it loads, and computes with their rounding."""

import tempfile
from dataclasses import replace

import pytest
import torch
from cases import Setting
from device_smoke import part_of
from matrix import matrix
from plugin_runs import runs, step
from safetensors.torch import load_file, save_file

from booster_core.ranks.coordinator import DistCoordinator
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

pytest.importorskip("transformers", reason="the model is transformers'")

OFFLOADING = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "offload_dir": tempfile.gettempdir()}
SETTINGS = {
    **runs("single", "zero1", "zero2", "gemini", "hybrid-dp"),
    "gemini-offloading": Setting(GeminiPlugin, {**OFFLOADING, "min_chunk_bytes": 2**12}),
    "hybrid-tp2-zero1": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}, 4),
    "hybrid-tp2-zero3": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 3}, 4),
    "hybrid-pp2-zero1": Setting(HybridParallelPlugin, {"pp_size": 2, "zero_stage": 1}, 4),
}
SHARDED = [name for name in SETTINGS if name != "single"]
TOKENS = torch.arange(12).view(2, 6)


def llama(seed):
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = tiny_llama(tie_word_embeddings=True)
        for parameter in model.parameters():  # the weights of norms as well have digits that bf16 lacks
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model


def boosted(run, precision):
    booster, model = replace(SETTINGS[run], precision=precision).make_booster(), llama(seed=3)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return booster, model, optimizer


def trained(run, precision):
    """Return the objects after a step."""
    objects = boosted(run, precision)
    step(*objects, {"input_ids": TOKENS, "labels": TOKENS})
    return objects


def check_digits(booster, model, optimizer, expected):
    """Compare masters and working values with fp32 values, bit for bit; masters cover every parameter."""
    adapter, covered = booster.state_adapter(model, optimizer), 0
    for shard in adapter.model_shards():
        values = part_of(expected[shard.name], shard).flatten()
        assert shard.dtype != torch.float32
        assert torch.equal(shard.data.reshape(-1), values.to(shard.dtype)), shard.name
    for shard in adapter.optimizer_shards():
        if shard.state == "master":
            assert shard.dtype == torch.float32
            assert torch.equal(shard.data.reshape(-1), part_of(expected[shard.name], shard).flatten()), shard.name
            covered += shard.numel * shard.is_owner
    total = sum(DistCoordinator().all_gather_object(covered))
    assert total == sum(values.numel() for values in expected.values())


def load_model_file(run, precision, path):
    booster, model, optimizer = boosted(run, precision)
    booster.load_model(model, path)
    check_digits(booster, model, optimizer, load_file(path))


@matrix(["zero1-fp16", "hybrid-dp-bf16", "hybrid-dp-fp16"], run=SHARDED, precision=["bf16", "fp16"])
def test_masters_take_the_values_of_an_fp32_file(run, precision, tmp_path):
    path = tmp_path / "model.safetensors"
    values = llama(seed=11).state_dict()
    save_file({name: tensor for name, tensor in values.items() if name != "lm_head.weight"}, path)
    run_on_ranks(load_model_file, SETTINGS[run].num_ranks, run, precision, str(path))


def load_rounded_file(run, path):
    """Load a file in bf16; a master may keep digits that round to its value."""
    booster, model, optimizer = boosted(run, "bf16")
    booster.load_model(model, path)
    expected = load_file(path)
    adapter, names = booster.state_adapter(model, optimizer), set()
    for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
        if shard.state in (None, "master"):
            assert shard.data.reshape(-1).bfloat16().equal(part_of(expected[shard.name], shard).flatten()), shard.name
            names |= {shard.name} if shard.state == "master" else set()
    assert set().union(*DistCoordinator().all_gather_object(names)) == expected.keys()


@matrix(["zero1", "zero2", "gemini"], run=SHARDED)
def test_masters_follow_the_values_of_a_file_without_their_digits(run, tmp_path):
    """Masters that stayed as they were would undo the load at the next step."""
    path = tmp_path / "model.safetensors"
    values = llama(seed=13).state_dict()
    save_file({name: tensor.bfloat16() for name, tensor in values.items() if name != "lm_head.weight"}, path)
    run_on_ranks(load_rounded_file, SETTINGS[run].num_ranks, run, str(path))


def save_fp32_run(root):
    booster, model, optimizer = trained("single", None)
    booster.save_checkpoint(root, step=1, model=model, optimizer=optimizer)
    save_file({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, f"{root}/expected")


def load_fp32_run(run, root):
    booster, model, optimizer = boosted(run, "bf16")
    booster.load_checkpoint(root, model=model, optimizer=optimizer)
    check_digits(booster, model, optimizer, load_file(f"{root}/expected"))


@pytest.mark.parametrize("run", ["zero2", "gemini", "hybrid-tp2-zero1"])
def test_masters_take_the_values_of_an_fp32_run(run, tmp_path):
    run_on_ranks(save_fp32_run, 1, str(tmp_path))
    run_on_ranks(load_fp32_run, SETTINGS[run].num_ranks, run, str(tmp_path))


def save_bf16_run(folder):
    booster, model, optimizer = trained("zero2", "bf16")
    booster.save_model(model, f"{folder}/m", shard=True)
    booster.save_optimizer(optimizer, f"{folder}/o", shard=True)


def load_bf16_run(folder, model_first):
    booster, model, optimizer = boosted("zero2", "bf16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    calls = [(booster.load_model, model, "m"), (booster.load_optimizer, optimizer, "o")]
    for call, loaded_into, name in calls if model_first else calls[::-1]:
        call(loaded_into, f"{folder}/{name}")
    saved = load_file(f"{folder}/o/optimizer-00001-of-00001.safetensors")
    check_digits(booster, model, optimizer, {key[:-7]: each for key, each in saved.items() if key.endswith("/master")})


@pytest.mark.parametrize("model_first", [True, False])
def test_masters_load_exactly_in_either_order(model_first, tmp_path):
    run_on_ranks(save_bf16_run, 2, str(tmp_path))
    run_on_ranks(load_bf16_run, 2, str(tmp_path), model_first)
