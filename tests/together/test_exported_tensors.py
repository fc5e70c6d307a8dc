"""Tensors out of a run without a file: names and values of `save_model`'s files, under every plugin."""

from dataclasses import replace

import peft
import pytest
import torch
from cases import Setting
from matrix import matrix
from plugin_runs import RUNS, runs
from ranked import on_ranks, raises_on_ranks
from safetensors.torch import load_file
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import whole_parameters
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

SETTINGS = {
    **runs("single", "ddp", "fsdp", "gemini", "hybrid-tp"),
    "zero": RUNS["zero2"],
    "hybrid-pp": Setting(HybridParallelPlugin, {"pp_size": 2, "pp_style": "zbv", "num_microbatches": 2}),
    "hybrid-tp-zero3": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 3}, 4),
}

EQUAL = {"rtol": 0, "atol": 0}


def llama():
    return tiny_llama(num_hidden_layers=4, tie_word_embeddings=True)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2, num_local_experts=4))


def boost(run, make=llama, precision="bf16", lora=None):
    torch.manual_seed(3)
    booster = replace(SETTINGS[run], precision=precision).make_booster()
    model = make()
    if lora is not None:
        model = booster.enable_lora(model, lora_config=lora)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    model, *_ = booster.boost(model, optimizer)
    return booster, model


@matrix(1, run=SETTINGS, make=[llama, mixtral])
@on_ranks(lambda run: SETTINGS[run].num_ranks)
def test_names_and_values_are_those_of_files(run, make, tmp_path):
    folder = tmp_path / "out"
    booster, model = boost(run, make)
    booster.save_model(model, folder, shard=True)
    coordinator = booster.context.coordinator
    booster.wait()
    coordinator.block_all()
    expected = {}
    for path in sorted(folder.glob("*.safetensors")):
        expected |= load_file(path)
    largest = max(tensor.nbytes for tensor in expected.values())
    for bucket_bytes in (1, 2 * largest, 1 << 30):
        found = dict(whole_parameters(booster, model, bucket_bytes=bucket_bytes))
        torch.testing.assert_close(found, expected, **EQUAL)
    narrow = dict(whole_parameters(booster, model, dtype=torch.bfloat16))
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    torch.testing.assert_close(narrow, rounded, **EQUAL)
    for rank in range(coordinator.world_size):
        found = list(whole_parameters(booster, model, rank=rank))
        if coordinator.rank == rank:
            torch.testing.assert_close(dict(found), expected, **EQUAL)
        else:
            assert all(tensor.is_meta for _, tensor in found)
            assert [(name, tensor.shape) for name, tensor in found] == [(name, narrow[name].shape) for name in narrow]


def merged(run, lora):
    booster, model = boost(run, llama, "fp32", lora)
    return {name: tensor.clone() for name, tensor in whole_parameters(booster, model, merge_lora=True)}


@matrix(1, run=SETTINGS)
def test_adapters_are_merged_as_peft_merges_them(run):
    lora = peft.LoraConfig(r=4, lora_alpha=7, target_modules=["q_proj", "o_proj", "down_proj"], use_rslora=True)
    _, model = boost("single", llama, "fp32", lora)
    expected = model.unwrap().merge_and_unload().state_dict()
    del expected["lm_head.weight"]
    for actual in run_on_ranks(merged, SETTINGS[run].num_ranks, run, lora):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "lora",
    [
        peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
        peft.LoraConfig(r=4, target_modules=["embed_tokens"], ensure_weight_tying=True),
        peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]),
    ],
)
def test_other_adapters_are_refused(lora):
    with pytest.raises(ConfigError, match="merge them by peft"):
        merged("single", lora)


def test_wrong_requests_are_refused():
    booster, model = boost("single")
    with pytest.raises(ConfigError, match="no adapters to merge"):
        list(whole_parameters(booster, model, merge_lora=True))
    with pytest.raises(ConfigError, match="out of range"):
        list(whole_parameters(booster, model, rank=1))
    with pytest.raises(TypeError):
        list(whole_parameters(booster, nn.Linear(2, 2)))


@raises_on_ranks(ConfigError, "whole_parameters", 2)
def test_ranks_must_ask_for_the_same():
    booster, model = boost("ddp")
    list(whole_parameters(booster, model, rank=booster.context.coordinator.rank))
