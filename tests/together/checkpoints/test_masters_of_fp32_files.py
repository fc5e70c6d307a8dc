"""A run with fp32 masters keeps every digit of fp32 values that it loads, and computes with their rounding."""

import tempfile
from dataclasses import replace

import pytest
import torch
from cases import Setting
from device_smoke import part_of
from matrix import matrix
from plugin_runs import runs, step
from ranked import on_ranks
from safetensors.torch import load_file, save_file

from booster_core.ranks.coordinator import DistCoordinator
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.models import tiny_llama

pytest.importorskip("transformers", reason="the model is transformers'")

OFFLOADING = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "offload_dir": tempfile.gettempdir()}
SETTINGS = {
    **runs("ddp", "zero1", "zero2", "gemini", "hybrid-dp"),
    "gemini-offloading": Setting(GeminiPlugin, {**OFFLOADING, "min_chunk_bytes": 2**12}),
    "hybrid-tp2-zero1": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1}, 4),
    "hybrid-tp2-zero3": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 3}, 4),
    "hybrid-pp2-zero1": Setting(HybridParallelPlugin, {"pp_size": 2, "zero_stage": 1}, 4),
}
SHARDED = [name for name in SETTINGS if name != "ddp"]
TOKENS = torch.arange(12).view(2, 6)


def num_ranks_of(run):
    return SETTINGS[run].num_ranks


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


def write(path, seed, dtype):
    """Write a model's values in a format, by the first rank, and return them."""
    values = {name: tensor.to(dtype) for name, tensor in llama(seed).state_dict().items() if name != "lm_head.weight"}
    if DistCoordinator().is_master():
        save_file(values, path)
    DistCoordinator().block_all()
    return values


@matrix(["zero1-fp16", "hybrid-dp-bf16", "hybrid-dp-fp16"], run=SHARDED, precision=["bf16", "fp16"])
@on_ranks(num_ranks_of)
def test_masters_take_the_values_of_an_fp32_file(run, precision, tmp_path):
    expected = write(tmp_path / "model.safetensors", 11, torch.float32)
    booster, model, optimizer = boosted(run, precision)
    booster.load_model(model, tmp_path / "model.safetensors")
    check_digits(booster, model, optimizer, expected)


@matrix(["zero1", "zero2", "gemini"], run=SHARDED)
@on_ranks(num_ranks_of)
def test_masters_follow_the_values_of_a_file_without_their_digits(run, tmp_path):
    """Masters that stayed as they were would undo the load at the next step; they may keep digits that round to it."""
    expected = write(tmp_path / "model.safetensors", 13, torch.bfloat16)
    booster, model, optimizer = boosted(run, "bf16")
    booster.load_model(model, tmp_path / "model.safetensors")
    adapter, names = booster.state_adapter(model, optimizer), set()
    for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
        if shard.state in (None, "master"):
            assert shard.data.reshape(-1).bfloat16().equal(part_of(expected[shard.name], shard).flatten()), shard.name
            names |= {shard.name} if shard.state == "master" else set()
    assert set().union(*DistCoordinator().all_gather_object(names)) == expected.keys()


@pytest.mark.parametrize("run", ["zero2", "gemini", "hybrid-tp2-zero1"])
@on_ranks(num_ranks_of)
def test_masters_take_the_values_of_an_fp32_run(run, tmp_path):
    booster, model, optimizer = trained("ddp", None)
    booster.save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    expected = {name: tensor.detach().clone() for name, tensor in model.unwrap().named_parameters()}
    booster, model, optimizer = boosted(run, "bf16")
    booster.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    check_digits(booster, model, optimizer, expected)


@pytest.mark.parametrize("model_first", [True, False])
@on_ranks(2)
def test_masters_load_exactly_in_either_order(model_first, tmp_path):
    booster, model, optimizer = trained("zero2", "bf16")
    booster.save_model(model, tmp_path / "m", shard=True)
    booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
    booster, model, optimizer = boosted("zero2", "bf16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    calls = [(booster.load_model, model, "m"), (booster.load_optimizer, optimizer, "o")]
    for call, loaded_into, name in calls if model_first else calls[::-1]:
        call(loaded_into, tmp_path / name)
    saved = load_file(tmp_path / "o" / "optimizer-00001-of-00001.safetensors")
    check_digits(booster, model, optimizer, {key[:-7]: each for key, each in saved.items() if key.endswith("/master")})
