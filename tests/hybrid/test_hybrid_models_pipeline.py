"""Models and heads cut into pipeline stages: loss, outputs, gradients, norm and parameters are those of one process."""

from functools import partial

import pytest
import torch
from cases import Setting, assert_equals_one_process, zoo_case
from matrix import matrix, named
from model_parity import NAMES, assert_near_fp32, parity_case, parity_setting
from model_zoo import get_model

from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing
from booster_testing.training import whole_model

SAMPLES = 5
"""Of each data parallel rank: microbatches of three and of two."""
MESHES = {
    "pp2": (2, {"pp_size": 2}),
    "tp2pp2": (4, {"tp_size": 2, "pp_size": 2}),
    "pp2dp2zero1": (4, {"pp_size": 2, "zero_stage": 1}),
    "pp2dp2zero2": (4, {"pp_size": 2, "zero_stage": 2}),
}
SCALE = 2.0**10


@matrix(
    [
        "transformers/falcon_alibi-pp2",
        "transformers/gpt2_double_heads-pp2dp2zero1",
        "heads/llama_classification-pp2",
        "heads/t5_token_classification-pp2",
        "transformers/t5_encoder-tp2pp2",
    ],
    1,
    name=NAMES,
    mesh=MESHES,
)
def test_training_equals_one_process(name, mesh):
    num_ranks, options = MESHES[mesh]
    case = parity_case(name, samples=SAMPLES, outputs=True)
    assert_equals_one_process(case, parity_setting(name, options, num_ranks))


def overflow(case, booster, model, optimizer):
    """Let the loss of one replica overflow: no rank takes a step."""
    before = whole_model(booster, model)
    replica, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    infinite = float("inf") if replica == 0 else 1.0
    batch = case.batch(1, replica)
    booster.execute_pipeline(iter([batch]), model, lambda *each: case.loss(*each) * infinite, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == SCALE / 2
    after = whole_model(booster, model)
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", ["transformers/t5_generation"])
def test_fp16_scales_the_loss(name):
    precision = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=SCALE))
    case = zoo_case(name, samples=SAMPLES)
    setting = parity_setting(name, {"pp_size": 2, "zero_stage": 1}, 4, precision)
    assert_near_fp32(case, setting, torch.float16, SCALE, tell=partial(overflow, case))


LLAMA = "transformers/llama"


@matrix(["t5_generation-zbv"], name=["t5_generation", "whisper_generation"], style=["gpipe", "interleaved", "zbv"])
def test_every_schedule_trains(name, style):
    setting = parity_setting(f"transformers/{name}", {"pp_size": 2, "pp_style": style}, 2)
    assert_equals_one_process(zoo_case(f"transformers/{name}"), setting, parts=2)


def recomputing(how):
    model = get_model(LLAMA).seeded()
    if how == "by the model":
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    elif how == "before boost":
        enable_activation_checkpointing(model)
    return model


def recompute(step, model, _optimizer):
    if step == 0:
        enable_activation_checkpointing(model)


@matrix(
    ["pp2-by the model", "pp2-after boost"],
    options=named([{"pp_size": 2}, {"pp_size": 2, "tp_size": 2}], ["pp2", "tp2pp2"]),
    how=["before boost", "after boost", "by the model"],
)
def test_layers_may_be_recomputed(options, how):
    hook = recompute if how == "after boost" else None
    case = zoo_case(LLAMA, build=partial(recomputing, how), before_step=hook)
    assert_equals_one_process(case, Setting(HybridParallelPlugin, options, 4))
