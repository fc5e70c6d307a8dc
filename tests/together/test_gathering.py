"""Whole parameters and optimizer state, read and changed by name during training, equal those of one process.

`test_programs.py` writes to all parameters of the boosted model.
"""

import pytest
import torch
from plugin_runs import RUNS, runs
from ranked import raises_on_ranks

from booster_core.errors import ConfigError
from booster_runtime import full_state, gathered, set_full_state, train_batch
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
PLUGINS = {
    **runs("single", "ddp", "fsdp", "zero1", "gemini", "zero3"),
    "tp2": RUNS["hybrid-tp"],
    "pp2": RUNS["hybrid-pp"],
}


def batch_of(number, index=0, size=1):
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(number))[index::size]
    return {"input_ids": tokens, "labels": tokens}


def train(name):
    """Train two steps, change weights and state by name, train two more; return what was read and the parameters."""
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2)
    booster = PLUGINS[name].make_booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    replica = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    is_master = booster.context.coordinator.is_master()
    read = {}

    def train_batches(numbers):
        for number in numbers:
            train_batch(booster, iter([batch_of(number, *replica)]), model, None, optimizer)

    train_batches(range(2))
    with gathered(booster, model, [WEIGHT, EMBEDDING]) as tensors:
        read["weight"] = tensors[WEIGHT].clone()
        tensors[EMBEDDING].zero_()  # a copy
    read["average"] = full_state(booster, model, WEIGHT, "momentum_buffer")
    with gathered(booster, model, [EMBEDDING, WEIGHT], writes=True) as tensors:
        if is_master:
            tensors[EMBEDDING][3] = 0.25
            tensors[WEIGHT].mul_(0.5)
        else:
            tensors[WEIGHT].zero_()  # rank 0's values count
    doubled = 2 * full_state(booster, model, WEIGHT, "momentum_buffer")
    set_full_state(booster, model, WEIGHT, "momentum_buffer", doubled if is_master else torch.zeros_like(doubled))
    read["doubled"] = full_state(booster, model, WEIGHT, "momentum_buffer")
    read["embedding"] = whole_model(booster, model)[EMBEDDING]
    train_batches(range(2, 4))
    return {**read, **whole_model(booster, model)}


@raises_on_ranks(ConfigError, r"with gathered\(booster, model, names, writes=True\)", 2)
def test_parts_of_layers_are_not_taken_for_whole_ones():
    model, *_ = PLUGINS["tp2"].make_booster().boost(tiny_llama(num_hidden_layers=2))
    with model.whole_parameters(writes=True):
        pass


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "pp2", "zero3")]


@pytest.mark.parametrize("name", ["zero1", "gemini", "tp2", *SLOW])  # those that cut tensors in ways of their own
def test_values_and_later_steps_equal_one_process(name):
    (expected,) = run_on_ranks(train, 1, "single")
    for found in run_on_ranks(train, 2, name):
        assert torch.equal(found["doubled"], 2 * found["average"])
        assert bool((found["embedding"][3] == 0.25).all())
        assert_same_tensors(found, expected, tolerance_for(torch.float32))
