"""Models and heads with split sequences: loss, gradients, norm and parameters are those of one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from matrix import matrix
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
from t5_sequences import run_or_refused

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.training import whole_model

ULYSSES = {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}
RING = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
SPLIT = {"tp_size": 2, "sequence_parallelism_mode": "split_gather"}
MODES = {"all_to_all": ULYSSES, "ring_attn": RING, "split_gather": SPLIT}
MESHES = {
    **{mode: (2, options) for mode, options in MODES.items()},
    **{f"{mode}-dp2zero1": (4, {**options, "zero_stage": 1}) for mode, options in MODES.items()},
    "all_to_all-tp2": (4, {**ULYSSES, "tp_size": 2}),
    "ring_attn-tp2": (4, {**RING, "tp_size": 2}),
}
WITHOUT_SEQUENCES = ("transformers/sam",)
SPLITTABLE = [name for name in NAMES if name not in WITHOUT_SEQUENCES]
DEFAULT = {
    "all_to_all": (
        "transformers/t5_generation",
        "transformers/deepseek_v3",
        "transformers/vit_classification",
        "transformers/bloom",
    ),
    "ring_attn": (
        "transformers/whisper_generation",
        "heads/blip2_t5",
        "heads/qwen3_question_answering",
        "transformers/falcon_alibi",
        "transformers/gptj",
    ),
    "split_gather": ("transformers/t5_generation", "transformers/blip2", "transformers/falcon_alibi"),
    "ring_attn-tp2": ("transformers/t5_generation",),
    "all_to_all-tp2": ("transformers/bert_pretraining",),
    "split_gather-dp2zero1": ("transformers/whisper_generation",),
}
"""Some of each family; the others are left to the long run."""


def compare(name, options):
    zoo = find(name)
    # Some have layers that take more than hidden states: the example shows how they are called.
    plugin = HybridParallelPlugin(**options, example_batch=in_format(zoo, zoo.share(0, 0, 2)))
    booster = Booster("cpu", plugin=plugin)
    replica = plugin.config.tensor.size * plugin.config.sequence.size
    data_size, data_rank = dist.get_world_size() // replica, dist.get_rank() // replica
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


def table(meshes, default):
    return [
        pytest.param(mesh, *case.values, marks=case.marks, id=f"{mesh}-{case.values[0]}")
        for mesh in meshes
        for case in cases(SPLITTABLE, default.get(mesh, ()))
    ]


@matrix(
    [
        "all_to_all-transformers/bloom",
        "ring_attn-transformers/falcon_alibi",
        "ring_attn-transformers/gptj",
        "ring_attn-heads/qwen3_question_answering",
        "split_gather-transformers/falcon_alibi",
    ],
    **{"mesh, name": table(MESHES, DEFAULT)},
)
def test_training_with_split_sequences_equals_one_process(mesh, name):
    num_ranks, options = MESHES[mesh]
    run_on_ranks(run_or_refused, num_ranks, compare, name, options, timeout_seconds=120)


def compare_in_stages(name, options):
    zoo = find(name)
    plugin = HybridParallelPlugin(**options, pp_size=2, example_batch=in_format(zoo, zoo.share(0, 0, 2)))
    booster = Booster("cpu", plugin=plugin)
    plain = train_plainly(zoo, lambda step: zoo.whole(step, 1, 4))
    original = seeded(zoo)
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    for step in range(STEPS):
        expected = plain.gradients[step]
        booster.execute_pipeline(iter([in_format(zoo, zoo.share(step, 0, 4))]), model, zoo.loss, optimizer)
        found = {key: full_gradient(booster, model, key) for key in expected}
        assert_equal(found, expected, zoo, largest(expected))
        assert float(optimizer.clip_grad_by_norm(MAX_NORM)) == pytest.approx(plain.norms[step], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


IN_STAGES = ["transformers/t5_generation", "transformers/whisper_generation", "transformers/llama"]


@matrix(["transformers/llama-all_to_all"], name=cases(IN_STAGES, IN_STAGES[-1:]), mode=MODES)
def test_stages_of_a_pipeline_split_sequences_too(mode, name):
    run_on_ranks(run_or_refused, 4, compare_in_stages, name, MODES[mode], timeout_seconds=120)


def narrow(name, options):
    zoo = find(name)
    batch = zoo.whole(0, 1, 4)
    booster = Booster("cpu", "bf16", HybridParallelPlugin(**options, example_batch=in_format(zoo, batch)))
    original = zoo.seeded()
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    booster.backward(zoo.loss_of(model, batch), optimizer)
    assert_narrow(zoo, batch, lambda names: {key: full_gradient(booster, model, key) for key in names})


NARROW_DEFAULT = dict.fromkeys(MODES, ("transformers/gpt2_lm",))


@matrix(["all_to_all-transformers/gpt2_lm"], **{"mode, name": table(MODES, NARROW_DEFAULT)})
def test_bf16_with_split_sequences_is_as_near_to_fp32_as_one_process(mode, name):
    run_on_ranks(run_or_refused, 2, narrow, name, MODES[mode], timeout_seconds=120)


def boost(name, options):
    model = find(name).seeded()
    Booster("cpu", plugin=HybridParallelPlugin(**options)).boost(model, make_optimizer(model))


@matrix(["ring_attn"], mode=MODES)
def test_positions_in_a_plane_are_refused(mode):
    without_batch = "It could not be checked whether 'vision_encoder"  # its tensor parallel layers come first
    message = without_batch if mode == "split_gather" else f"mode='{mode}'.*policy of SamModel names none"
    expect_on_ranks(ConfigError, message, boost, 2, "transformers/sam", MODES[mode])
