"""Whole parameters and optimizer state, read and changed by name during training, equal those of one process.

`test_programs.py` writes to all parameters of the boosted model.
"""

import pytest
import torch
from cases import tokens
from plugin_runs import RUNS, runs
from ranked import on_ranks, raises_on_ranks

from booster_core.errors import ConfigError
from booster_runtime import full_state, gathered, set_full_state, train_batch
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
PLUGINS = {
    **runs("ddp", "fsdp", "zero1", "gemini", "zero3"),
    "tp2": RUNS["hybrid-tp"],
    "pp2": RUNS["hybrid-pp"],
}


@raises_on_ranks(ConfigError, r"with gathered\(booster, model, names, writes=True\)", 2)
def test_parts_of_layers_are_not_taken_for_whole_ones():
    model, *_ = PLUGINS["tp2"].make_booster().boost(tiny_llama(num_hidden_layers=2))
    with model.whole_parameters(writes=True):
        pass


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "pp2", "zero3")]


@pytest.mark.parametrize("name", ["zero1", "gemini", "tp2", *SLOW])  # those that cut tensors in ways of their own
@on_ranks(2)
def test_values_and_later_steps_equal_one_process(name):
    """Train two steps, change weights and state by name, and train two more."""

    def model_and_optimizer():
        torch.manual_seed(0)
        model = tiny_llama(num_hidden_layers=2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(numbers):
        for number in numbers:
            whole = tokens(4, 8)(number, 0)
            plain(**whole).loss.backward()
            sgd.step()
            sgd.zero_grad()
            batch = {key: values[index::size] for key, values in whole.items()}
            train_batch(booster, iter([batch]), model, None, optimizer)

    def assert_same(found, expected):
        assert_same_tensors({"": found}, {"": expected}, tolerance_for(torch.float32))

    plain, sgd = model_and_optimizer()
    weight, embedding = plain.get_parameter(WEIGHT), plain.get_parameter(EMBEDDING)
    booster = PLUGINS[name].make_booster()
    model, optimizer, *_ = booster.boost(*model_and_optimizer())
    index, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    is_master = booster.context.coordinator.is_master()
    train(range(2))
    with gathered(booster, model, [WEIGHT, EMBEDDING]) as tensors:
        assert_same(tensors[WEIGHT], weight.detach())
        tensors[EMBEDDING].zero_()  # a copy
    with gathered(booster, model, [EMBEDDING, WEIGHT], writes=True) as tensors:
        if is_master:
            tensors[EMBEDDING][3] = 0.25
            tensors[WEIGHT].mul_(0.5)
        else:
            tensors[WEIGHT].zero_()  # rank 0's values count
    average, momentum = full_state(booster, model, WEIGHT, "momentum_buffer"), sgd.state[weight]["momentum_buffer"]
    assert_same(average, momentum)
    set_full_state(booster, model, WEIGHT, "momentum_buffer", (2 if is_master else 0) * average)
    assert torch.equal(full_state(booster, model, WEIGHT, "momentum_buffer"), 2 * average)
    assert bool((whole_model(booster, model)[EMBEDDING][3] == 0.25).all())
    with torch.no_grad():
        embedding[3] = 0.25
        weight.mul_(0.5)
        momentum.mul_(2)
    train(range(2, 4))
    expected = {key: parameter.detach() for key, parameter in plain.named_parameters()}
    assert_same_tensors(whole_model(booster, model), expected, tolerance_for(torch.float32))
