"""A run with fp32 masters keeps every digit of fp32 values that it loads, and computes with their rounding."""

import tempfile

import pytest
import torch
from matrix import matrix
from safetensors.torch import load_file, save_file

from booster_core import Booster, discovery
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import slices_of
from booster_testing import run_on_ranks

OFFLOADING = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "offload_dir": tempfile.gettempdir()}
RUNS = {
    "zero1": ("zero", {"stage": 1, "bucket_bytes": 4096}, 2),
    "zero2": ("zero", {"stage": 2, "bucket_bytes": 4096}, 2),
    "gemini": ("gemini", {"min_chunk_bytes": 2**12}, 2),
    "gemini-offloading": ("gemini", {**OFFLOADING, "min_chunk_bytes": 2**12}, 2),
    "hybrid-zero2": ("hybrid", {"zero_stage": 2}, 2),
    "hybrid-tp2-zero1": ("hybrid", {"tp_size": 2, "zero_stage": 1}, 4),
    "hybrid-tp2-zero3": ("hybrid", {"tp_size": 2, "zero_stage": 3}, 4),
    "hybrid-pp2-zero1": ("hybrid", {"pp_size": 2, "zero_stage": 1}, 4),
}


def llama(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, tie_word_embeddings=True, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():  # the weights of norms as well have digits that bf16 lacks
                parameter.add_(torch.randn_like(parameter) * 0.01)
        return model


def boosted(run, precision):
    plugin, options, _ = RUNS[run]
    booster = Booster(plugin=discovery.load(plugin)(**options), mixed_precision=precision)
    model = llama(seed=3)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return booster, model, optimizer


def part_of(values, shard):
    """Return the part of whole values that a shard holds."""
    start, stop = shard.flat_range
    return values[slices_of(shard.box)].reshape(-1)[start:stop]


def check_digits(booster, model, optimizer, expected):
    """Compare masters and working values with fp32 values, bit for bit; masters cover every parameter."""
    adapter, covered = booster.state_adapter(model, optimizer), 0
    for shard in adapter.model_shards():
        values = part_of(expected[shard.name], shard)
        assert shard.dtype != torch.float32
        assert torch.equal(shard.data.reshape(-1), values.to(shard.dtype)), shard.name
    for shard in adapter.optimizer_shards():
        if shard.state == "master":
            assert shard.dtype == torch.float32
            assert torch.equal(shard.data.reshape(-1), part_of(expected[shard.name], shard)), shard.name
            covered += shard.numel * shard.is_owner
    total = sum(DistCoordinator().all_gather_object(covered))
    assert total == sum(values.numel() for values in expected.values())


def load_model_file(run, precision, path):
    booster, model, optimizer = boosted(run, precision)
    booster.load_model(model, path)
    check_digits(booster, model, optimizer, load_file(path))


@matrix(["zero1-fp16", "hybrid-zero2-bf16", "hybrid-zero2-fp16"], run=RUNS, precision=["bf16", "fp16"])
def test_masters_take_the_values_of_an_fp32_file(run, precision, tmp_path):
    path = tmp_path / "model.safetensors"
    values = llama(seed=11).state_dict()
    save_file({name: tensor for name, tensor in values.items() if name != "lm_head.weight"}, path)
    run_on_ranks(load_model_file, RUNS[run][2], run, precision, str(path))


def load_rounded_file(run, path):
    """Load a file in bf16; a master may keep digits that round to its value."""
    booster, model, optimizer = boosted(run, "bf16")
    booster.load_model(model, path)
    expected = load_file(path)
    adapter, names = booster.state_adapter(model, optimizer), set()
    for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
        if shard.state in (None, "master"):
            assert torch.equal(shard.data.reshape(-1).bfloat16(), part_of(expected[shard.name], shard)), shard.name
            names |= {shard.name} if shard.state == "master" else set()
    assert set().union(*DistCoordinator().all_gather_object(names)) == expected.keys()


@matrix(["zero1", "zero2", "gemini"], run=RUNS)
def test_masters_follow_the_values_of_a_file_without_their_digits(run, tmp_path):
    """Masters that stayed as they were would undo the load at the next step."""
    path = tmp_path / "model.safetensors"
    values = llama(seed=13).state_dict()
    save_file({name: tensor.bfloat16() for name, tensor in values.items() if name != "lm_head.weight"}, path)
    run_on_ranks(load_rounded_file, RUNS[run][2], run, str(path))


def save_fp32_run(root):
    booster = Booster()
    model = llama(seed=5)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.arange(12).view(2, 6)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    booster.save_checkpoint(root, step=1, model=model, optimizer=optimizer)
    save_file({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, f"{root}/expected")


def load_fp32_run(run, root):
    booster, model, optimizer = boosted(run, "bf16")
    booster.load_checkpoint(root, model=model, optimizer=optimizer)
    check_digits(booster, model, optimizer, load_file(f"{root}/expected"))


@pytest.mark.parametrize("run", ["zero2", "gemini", "hybrid-tp2-zero1"])
def test_masters_take_the_values_of_an_fp32_run(run, tmp_path):
    run_on_ranks(save_fp32_run, 1, str(tmp_path))
    run_on_ranks(load_fp32_run, RUNS[run][2], run, str(tmp_path))


def save_bf16_run(folder):
    booster, model, optimizer = boosted("zero2", "bf16")
    tokens = torch.arange(12).view(2, 6)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
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
