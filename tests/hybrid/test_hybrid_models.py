"""Models and heads under tensor parallelism: loss, gradients, norm and parameters are those of one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from matrix import matrix, named
from model_parity import (
    MAX_NORM,
    NAMES,
    STEPS,
    assert_equal,
    assert_narrow,
    cases,
    find,
    in_format,
    largest,
    make_optimizer,
    seeded,
    train_plainly,
)

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.training import whole_model

DEFAULT = (
    "heads/llama_classification",
    "heads/llama_token_classification",
    "heads/llama_question_answering",
    "heads/qwen3_lm",
    "heads/falcon_groups_lm",
    "heads/blip2_t5",
    "heads/t5_token_classification",
    "transformers/mixtral",
    "transformers/deepseek_v3",
    "transformers/gpt2_double_heads",
    "transformers/bert_pretraining",
    "transformers/t5_generation",
    "transformers/bloom",
    "transformers/falcon_alibi",
    "transformers/vit_classification",
    "transformers/whisper_generation",
    "transformers/sam",
    "transformers/blip2",
)
"""One of each family and head; the others are left to the long run."""
NARROW_DEFAULT = (
    "heads/llama_classification",
    "transformers/mixtral",
    "transformers/t5_generation",
    "transformers/sam",
)
"""Layers that round in different ways; the others are left to the long run."""


def compare(name, options):
    zoo = find(name)
    plugin = HybridParallelPlugin(**options)
    booster = Booster("cpu", plugin=plugin)
    data_size = dist.get_world_size() // plugin.config.tensor.size
    data_rank = dist.get_rank() // plugin.config.tensor.size
    plain = train_plainly(zoo, lambda step: zoo.whole(step, data_size, 4))
    original = seeded(zoo)
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    for step in range(STEPS):
        expected = plain.gradients[step]
        loss = zoo.loss_of(model, in_format(zoo, zoo.share(step, data_rank, 4)))
        booster.backward(loss, optimizer)
        found = {key: full_gradient(booster, model, key) for key in expected}
        assert_equal(found, expected, zoo, largest(expected))
        assert float(optimizer.clip_grad_by_norm(MAX_NORM)) == pytest.approx(plain.norms[step], rel=1e-5)
        if data_size == 1:
            assert float(loss.detach()) == pytest.approx(plain.losses[step], rel=1e-5, abs=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    whole = whole_model(booster, model)
    assert_equal({key: whole[key] for key in plain.parameters}, plain.parameters, zoo, largest(plain.gradients[-1]))


@matrix(
    [
        "transformers/mixtral-tp2",
        "transformers/gpt2_double_heads-tp2",
        "heads/llama_token_classification-tp2",
        "heads/qwen3_lm-tp2",
    ],
    name=cases(NAMES, DEFAULT),
    **{
        "num_ranks, options": named(
            [(2, {"tp_size": 2}), (4, {"tp_size": 2, "zero_stage": 1})], ["tp2", "tp2dp2zero1"], joint=True
        )
    },
)
def test_training_equals_one_process(name, num_ranks, options):
    run_on_ranks(compare, num_ranks, name, options)


def narrow(name):
    zoo = find(name)
    batch = zoo.whole(0, 1, 4)
    booster = Booster("cpu", "bf16", HybridParallelPlugin(tp_size=2))
    original = zoo.seeded()
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    booster.backward(zoo.loss_of(model, batch), optimizer)
    assert_narrow(zoo, batch, lambda names: {key: full_gradient(booster, model, key) for key in names})


@matrix(["heads/llama_classification"], name=cases(NAMES, NARROW_DEFAULT))
def test_bf16_is_as_near_to_fp32_as_one_process(name):
    run_on_ranks(narrow, 2, name)
