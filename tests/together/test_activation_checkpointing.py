"""Activation checkpointing under every plugin, ours and a model's own: gradients and names are those without."""

import torch
from matrix import matrix

from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing, full_gradient
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
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


def gradients_of_a_llama(plugin_class, options, how):
    torch.manual_seed(4)
    model = tiny_llama(use_cache=True, attention_dropout=0.0)
    if how == "before":
        enable_activation_checkpointing(model, "LlamaDecoderLayer")
    elif how == "keep":
        enable_activation_checkpointing(model, "LlamaDecoderLayer", keep="expensive")
    elif how == "own":
        use_own_checkpointing(model)
    booster = Booster("cpu", plugin=plugin_class(**options))
    model.train()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if how == "after":
        assert enable_activation_checkpointing(model) == ["model.layers.0", "model.layers.1"]
    data_rank, data_size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    results = {}
    for index in range(2):  # the second step runs with what the first one recorded
        tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(index))
        tokens = tokens[data_rank::data_size]
        booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
        names = [name for name, _ in tiny_llama().named_parameters()]
        results |= {f"{index} {name}": full_gradient(booster, model, name) for name in names}
        optimizer.step()
        optimizer.zero_grad()
    assert list(booster.state_adapter(model).tied_names()) == []
    return results, sorted({shard.name for shard in booster.state_adapter(model).model_shards()})


def test_products_that_are_kept_are_summed_over_ranks_once():
    expected, _ = gradients_of_a_llama(SingleDeviceStrategy, {}, None)
    for actual, _ in run_on_ranks(gradients_of_a_llama, 2, HybridParallelPlugin, {"tp_size": 2}, "keep"):
        assert_same_tensors(actual, expected, tolerance_for(torch.float32))


@matrix(
    ["single-before", "zero1-keep", "zero2-before", "hybrid-after", "gemini-own"],
    run=RUNS,
    how=["before", "after", "own", "keep"],
)
def test_gradients_and_names_equal_those_without(run, how):
    plugin_class, options, world_size = RUNS[run]
    expected, _ = gradients_of_a_llama(SingleDeviceStrategy, {}, None)
    for actual, names in run_on_ranks(gradients_of_a_llama, world_size, plugin_class, options, how):
        assert_same_tensors(actual, expected, tolerance_for(torch.float32))
        assert set(names) <= {name for name, _ in tiny_llama().named_parameters()}
