"""``torch.compile`` of models in stages and with spread experts: as eager training and one process, or a refusal."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compiler_warnings import ignore_compiler_warnings
from expert_models import batch_of, make

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import compile_layers, full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import tiny_llama

BACKEND = "aot_eager"  # needs no C++ compiler


def whole(model):
    return torch.compile(model, backend=BACKEND)


def in_place(model):
    model.compile(backend=BACKEND)
    return model


def layers(model):
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def blocks(model):
    compile_layers(model, backend=BACKEND)
    return model


PIPELINE = {"pp_size": 2}


def wrapped_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend=BACKEND)
    return model


def train(options, before=None, after=None):
    ignore_compiler_warnings()
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2)
    model = model if before is None else before(model)
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    model = model if after is None else after(model)
    losses = []
    for step in range(3):
        tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": tokens, "labels": tokens}
        if "pp_size" in options:
            loss = booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)["loss"]
        else:
            outputs = model(**batch)
            loss = outputs.loss + outputs.logits.softmax(-1).square().sum(-1).mean()
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(layers, None), (blocks, None), (wrapped_layers, None), (None, layers)])
def test_a_pipeline_of_compiled_parts_trains_as_eager_does(before, after):
    (_, expected), (_, found) = run_on_ranks(train, 2, PIPELINE), run_on_ranks(train, 2, PIPELINE, before, after)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", [whole, in_place])
def test_a_model_that_was_compiled_as_a_whole_is_not_cut(how):
    expect_on_ranks(
        ConfigError, r"Compile its layers instead, for example .*layer\.compile\(\)", train, 2, PIPELINE, how
    )


# ---- spread experts


LIMITS = {"timeout_seconds": 600.0, "group_timeout_seconds": 300.0}
"""Ranks compile for as long as a busy machine lets them, and wait for each other's tokens meanwhile."""
STEPS = 2
"""The second step shows whether the first one changed every parameter, and calls what is compiled again."""


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def compare(name, options, before, after):
    ignore_compiler_warnings()
    data_size = dist.get_world_size() // options.get("tp_size", 1)
    plain, model = (make(name, dtype=torch.float32, num_hidden_layers=1) for _ in range(2))  # two take twice as long
    reference = make_optimizer(plain)
    model = model if before is None else before(model)
    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    data_rank, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    model = model if after is None else after(model)
    for step in range(STEPS):
        for each in range(data_size):
            (plain(**batch_of(step, each)).loss / data_size).backward()
        booster.backward(model(**batch_of(step, data_rank)).loss, optimizer)
        for key, parameter in plain.named_parameters():
            if parameter.grad is not None:
                found = full_gradient(booster, model, key)
                torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=2e-6, msg=f"{step} {key}")
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(whole, None, marks=pytest.mark.slow),
        pytest.param(in_place, None, marks=pytest.mark.slow),
        pytest.param(None, whole, marks=pytest.mark.slow),
        pytest.param(None, in_place, marks=pytest.mark.slow),
        (layers, None),  # the least to compile; experts break graphs in the same way
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_compiled_models_have_the_gradients_of_one_process(name, before, after):
    run_on_ranks(compare, 2, name, {"ep_size": 2}, before, after, **LIMITS)
