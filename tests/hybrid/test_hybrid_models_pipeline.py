"""Models and heads cut into pipeline stages: loss, outputs, gradients, norm and parameters are those of one process."""

from __future__ import annotations

import pytest
import torch
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

from booster_core import Booster
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_core.ranks.coordinator import DistCoordinator
from booster_hybrid import HybridParallelPlugin, SplitLogits
from booster_runtime import full_gradient
from booster_runtime.data import leaves_by_path
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

SAMPLES = 5
"""Of each data parallel rank: microbatches of three and of two."""
MESHES = {
    "pp2": (2, {"pp_size": 2}),
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "pp2dp2zero1": (4, {"pp_size": 2, "zero_stage": 1}),
    "pp2dp2zero2": (4, {"pp_size": 2, "zero_stage": 2}),
}
DEEP = {
    "pp4": (4, {"pp_size": 4}),
    "zbv": (2, {"pp_size": 2, "pp_style": "zbv"}),
    "interleaved": (2, {"pp_size": 2, "pp_style": "interleaved"}),
}
"""For models of four layers and more: encoders with decoders."""
DEFAULT = {
    "heads/llama_classification": "pp2",
    "transformers/mistral": "pp2dp2zero2",
    "transformers/mixtral": "tp2pp2",
    "transformers/qwen2": "pp2dp2zero1",
    "heads/qwen3_token_classification": "pp2",
    "transformers/gemma": "pp2dp2zero2",
    "transformers/phi": "tp2pp2",
    "transformers/deepseek_v3": "pp2dp2zero1",
    "transformers/cohere": "pp2dp2zero2",
    "transformers/glm": "tp2pp2",
    "transformers/falcon_alibi": "pp2",
    "transformers/gpt2_double_heads": "pp2dp2zero1",
    "heads/gptj_question_answering": "pp2",
    "transformers/opt": "pp2dp2zero2",
    "heads/bloom_classification": "tp2pp2",
    "transformers/bert_pretraining": "pp2dp2zero1",
    "transformers/t5": "pp2dp2zero2",
    "heads/t5_token_classification": "pp2",
    "transformers/vit_classification": "tp2pp2",
    "transformers/whisper": "pp2dp2zero1",
    "transformers/sam": "pp2",
    "transformers/blip2": "tp2pp2",
    "heads/blip2_t5": "pp2",
}
"""One of each family, on one mesh; the others are left to the long run."""
SCALE = 2.0**10
NARROW_DEFAULT = ("heads/llama_lm", "transformers/t5_generation", "transformers/blip2")


def boosted(zoo, options, precision=None):
    original, example = zoo.seeded(), zoo.share(0, 0, 2)
    if precision is None:
        original, example = seeded(zoo), in_format(zoo, example)
    booster = Booster("cpu", precision, HybridParallelPlugin(**options, example_batch=example))
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    return booster, model, optimizer


def tensors_of(outputs):
    """Return the tensors of a model's outputs, whole, by where they are."""
    # transformers 5.12 registers its outputs without names.
    tensors = {where: leaf.detach() for where, leaf in leaves_by_path(outputs)[0] if isinstance(leaf, torch.Tensor)}
    return {where: leaf.gather() if isinstance(leaf, SplitLogits) else leaf for where, leaf in tensors.items()}


def compare(name, options):
    zoo = find(name)
    booster, model, optimizer = boosted(zoo, options)
    data_rank, data_size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    plain = train_plainly(zoo, lambda step: zoo.whole(step, data_size, SAMPLES))
    for step in range(STEPS):
        expected = plain.gradients[step]
        batch = in_format(zoo, zoo.share(step, data_rank, SAMPLES))
        result = booster.execute_pipeline(iter([batch]), model, zoo.loss, optimizer, return_outputs=step == 0)
        found = {key: full_gradient(booster, model, key) for key in expected}
        assert_equal(found, expected, zoo, largest(expected))
        assert float(optimizer.clip_grad_by_norm(MAX_NORM)) == pytest.approx(plain.norms[step], rel=1e-5)
        losses = DistCoordinator().all_gather_object(None if result["loss"] is None else float(result["loss"]))
        losses = [loss for loss in losses if loss is not None]
        assert sum(losses) / len(losses) == pytest.approx(plain.losses[step], rel=1e-5, abs=1e-6)
        if step == 0:
            assert_same_outputs(zoo, result["outputs"], batch, is_last=result["loss"] is not None)
        optimizer.step()
        optimizer.zero_grad()
    whole = whole_model(booster, model)
    assert_equal({key: whole[key] for key in plain.parameters}, plain.parameters, zoo, largest(plain.gradients[-1]))


def assert_same_outputs(zoo, outputs, batch, *, is_last):
    if not is_last:
        assert outputs is None
        return
    model = seeded(zoo)
    with torch.no_grad():
        expected = tensors_of(model(**{key: value for key, value in batch.items() if key not in zoo.loss_only}))
    found = tensors_of(outputs)
    dtype = next(model.parameters()).dtype
    assert_same_tensors(found, expected, tolerance_for(dtype))


@matrix(
    [
        "transformers/falcon_alibi-pp2",
        "transformers/gpt2_double_heads-pp2dp2zero1",
        "heads/llama_classification-pp2",
        "heads/t5_token_classification-pp2",
    ],
    **{
        "name, mesh": [
            pytest.param(name, mesh, marks=[] if DEFAULT.get(name) == mesh else [pytest.mark.slow])
            for name in NAMES
            for mesh in MESHES
        ]
    },
)
def test_training_equals_one_process(name, mesh):
    num_ranks, options = MESHES[mesh]
    run_on_ranks(compare, num_ranks, name, options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", DEEP)
@pytest.mark.parametrize(
    "name", ["transformers/t5", "transformers/whisper_generation", "transformers/blip2", "heads/blip2_t5"]
)
def test_encoders_with_decoders_are_cut_anywhere(name, mesh):
    num_ranks, options = DEEP[mesh]
    run_on_ranks(compare, num_ranks, name, options)


def narrow(name, options):
    zoo = find(name)
    booster, model, optimizer = boosted(zoo, options, "bf16")
    batch = zoo.whole(0, 1, 4)
    booster.execute_pipeline(iter([batch]), model, zoo.loss, optimizer)
    assert_narrow(zoo, batch, lambda names: {key: full_gradient(booster, model, key) for key in names})


@matrix(["heads/llama_lm"], name=cases(NAMES, NARROW_DEFAULT))
def test_bf16_is_as_near_to_fp32_as_one_process(name):
    run_on_ranks(narrow, 2, name, {"pp_size": 2})


def scaled(name, options):
    """Train in fp16: gradients are about those of one process, and an overflow on one rank takes no step on any."""
    zoo = find(name)
    precision = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=SCALE))
    booster, model, optimizer = boosted(zoo, options, precision)
    data_rank, data_size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    batch = zoo.share(0, data_rank, SAMPLES)
    booster.execute_pipeline(iter([batch]), model, zoo.loss, optimizer)
    assert_narrow(
        zoo,
        zoo.whole(0, data_size, SAMPLES),
        lambda names: {key: full_gradient(booster, model, key) for key in names},
        torch.float16,
        SCALE,
    )
    optimizer.step()
    optimizer.zero_grad()
    before = whole_model(booster, model)
    infinite = float("inf") if data_rank == 0 else 1.0
    booster.execute_pipeline(iter([batch]), model, lambda *each: zoo.loss(*each) * infinite, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == SCALE / 2
    after = whole_model(booster, model)
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", ["transformers/t5_generation"])
def test_fp16_scales_the_loss(name):
    run_on_ranks(scaled, 4, name, {"pp_size": 2, "zero_stage": 1})
