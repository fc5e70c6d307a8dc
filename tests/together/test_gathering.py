"""Whole parameters and optimizer state, read and changed by name during training, equal those of one process."""

import pytest
import torch

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_state, gathered, set_full_state, train_batch
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {}),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 8192}),
    "tp2": (HybridParallelPlugin, {"tp_size": 2}),
    "pp2": (HybridParallelPlugin, {"pp_size": 2}),
    "zero3": (HybridParallelPlugin, {"zero_stage": 3}),
}


def tokens(step):
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))


def train(plugin_class, options, precision):
    """Train two steps, change weights and state by name, train two more; return what was read and the parameters."""
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2)
    booster = Booster("cpu", precision, plugin=plugin_class(**options))
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    if "pp_size" in options:
        booster = Booster("cpu", precision, plugin=plugin_class(**options, example_batch=batch))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    read = {}

    def step(number):
        batch = {"input_ids": tokens(number)[rank::size], "labels": tokens(number)[rank::size]}
        train_batch(booster, iter([batch]), model, None, optimizer)

    for number in range(2):
        step(number)
    with gathered(booster, model, [WEIGHT, EMBEDDING]) as tensors:
        read["weight"] = tensors[WEIGHT].clone()
        tensors[EMBEDDING].zero_()  # a copy
    read["average"] = full_state(booster, model, WEIGHT, "momentum_buffer")
    with gathered(booster, model, [EMBEDDING, WEIGHT], writes=True) as tensors:
        if booster.context.coordinator.is_master():
            tensors[EMBEDDING][3] = 0.25
            tensors[WEIGHT].mul_(0.5)
    doubled = 2 * full_state(booster, model, WEIGHT, "momentum_buffer")
    set_full_state(booster, model, WEIGHT, "momentum_buffer", doubled)
    read["doubled"] = full_state(booster, model, WEIGHT, "momentum_buffer")
    read["embedding"] = whole_model(booster, model)[EMBEDDING]
    for number in range(2, 4):
        step(number)
    return {**read, **whole_model(booster, model)}


def halve(plugin_class, options):
    """Halve all parameters as under any plugin, or return what the error names."""
    torch.manual_seed(0)
    booster = Booster("cpu", plugin=plugin_class(**options))
    model, *_ = booster.boost(tiny_llama(num_hidden_layers=2))
    try:
        with model.whole_parameters(writes=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    except ConfigError as error:
        return str(error)
    return whole_model(booster, model)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", "gemini", "zero3"])
def test_whole_parameters_can_be_written_under_every_plugin(name):
    (expected,) = run_on_ranks(halve, 1, SingleDeviceStrategy, {})
    for found in run_on_ranks(halve, 2, *PLUGINS[name]):
        assert_same_tensors(found, expected, tolerance_for(torch.float32))


def test_parts_of_layers_are_not_taken_for_whole_ones():
    for found in run_on_ranks(halve, 2, *PLUGINS["tp2"]):
        assert "with gathered(booster, model, names, writes=True)" in found


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "pp2", "zero3")]


@pytest.mark.parametrize("name", ["zero1", "gemini", "tp2", *SLOW])  # those that cut tensors in ways of their own
def test_values_and_later_steps_equal_one_process(name):
    (expected,) = run_on_ranks(train, 1, SingleDeviceStrategy, {}, None)
    for found in run_on_ranks(train, 2, *PLUGINS[name], None):
        assert torch.equal(found["doubled"], 2 * found["average"])
        assert bool((found["embedding"][3] == 0.25).all())
        assert_same_tensors(found, expected, tolerance_for(torch.float32))
