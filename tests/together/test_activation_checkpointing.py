"""Activation checkpointing under every plugin, ours and a model's own: gradients and names are those without."""

from functools import partial

import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process
from matrix import matrix

from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing
from booster_runtime.single import SingleDeviceStrategy
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

RUNS = {
    "single": (SingleDeviceStrategy, {}, 1),
    "ddp": (TorchDDPPlugin, {}, 2),
    "fsdp": (TorchFSDPPlugin, {}, 2),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}, 2),
    "zero2": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 2),
    "hybrid": (HybridParallelPlugin, {"tp_size": 2}, 2),
    "gemini": (GeminiPlugin, {}, 2),
}


def use_own_checkpointing(model):
    """Switch on transformers' own checkpointing, by the name that it has in this version."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def llama(how):
    """Return a model whose layers are computed again on ranks alone, where that is asked for before `boost`."""
    model = tiny_llama(use_cache=True, attention_dropout=0.0).train()
    if how in ("before", "keep") and dist.is_initialized():
        enable_activation_checkpointing(model, "LlamaDecoderLayer", keep="expensive" if how == "keep" else None)
    elif how == "own" and dist.is_initialized():
        use_own_checkpointing(model)
    return model


def tokens(number, replica):
    rows = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(10 * number + replica))
    return {"input_ids": rows, "labels": rows}


def switch_on(step, model, _optimizer):
    if step == 0 and dist.is_initialized():
        assert enable_activation_checkpointing(model) == ["model.layers.0", "model.layers.1"]


def names_of(booster, model, _optimizer):
    adapter = booster.state_adapter(model)
    return list(adapter.tied_names()), {shard.name for shard in adapter.model_shards()}


@matrix(
    ["single-before", "zero1-keep", "zero2-before", "hybrid-after", "hybrid-keep", "gemini-own"],
    run=RUNS,
    how=["before", "after", "own", "keep"],
)
def test_gradients_and_names_equal_those_without(run, how):
    case = Case(build=partial(llama, how), batch=tokens, before_step=switch_on if how == "after" else None)
    for tied, names in assert_equals_one_process(case, Setting(*RUNS[run]), tell=names_of):
        assert tied == []
        assert names <= {name for name, _ in tiny_llama().named_parameters()}
