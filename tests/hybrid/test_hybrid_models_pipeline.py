"""Models and heads cut into pipeline stages: loss, outputs, gradients, norm and parameters are those of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Setting, assert_equals_one_process, zoo_case
from matrix import matrix, named
from model_parity import NAMES, assert_near_fp32, parity_case, parity_setting
from model_zoo import get_model

from booster_core import Booster
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_hybrid import HybridParallelPlugin, SplitLogits
from booster_runtime import enable_activation_checkpointing
from booster_runtime.data import leaves_by_path
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors
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


def tensors_of(outputs):
    """Return the tensors of a model's outputs, whole, by where they are."""
    # transformers 5.12 registers its outputs without names.
    tensors = {where: leaf.detach() for where, leaf in leaves_by_path(outputs)[0] if isinstance(leaf, torch.Tensor)}
    return {where: leaf.gather() if isinstance(leaf, SplitLogits) else leaf for where, leaf in tensors.items()}


def compare_outputs(case, booster, model, optimizer):
    """Compare what the last stage returns with the outputs of the whole model."""
    whole = case.build()
    whole.load_state_dict(whole_model(booster, model))
    batch = case.batch(case.steps, 0)
    result = booster.execute_pipeline(iter([batch]), model, case.loss, optimizer, return_outputs=True)
    if result["loss"] is None:
        assert result["outputs"] is None
        return
    with torch.no_grad():
        expected = tensors_of(whole(**batch))
    assert_same_tensors(tensors_of(result["outputs"]), expected, case.tolerance)


def assert_parity(name, num_ranks, options):
    case = parity_case(name, samples=SAMPLES)
    assert_equals_one_process(case, parity_setting(name, options, num_ranks), tell=partial(compare_outputs, case))


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
    assert_parity(name, *MESHES[mesh])


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


def from_a_loader(steps):
    """Train from a data loader, which the dry run must not have taken anything from."""
    zoo = get_model(LLAMA)
    samples = [{key: value[0] for key, value in zoo.share(index, 0, 1).items()} for index in range(steps * 2)]
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2))
    model, optimizer = zoo_case(LLAMA).make()
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    state = torch.random.get_rng_state()
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    assert torch.equal(torch.random.get_rng_state(), state)
    batches, losses = iter(loader), []
    for _ in range(steps):
        losses.append(booster.execute_pipeline(batches, model, zoo.loss, optimizer)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert next(batches, None) is None
    return losses


def test_the_data_loader_is_the_example():
    assert len(run_on_ranks(from_a_loader, 2, 3)[1]) == 3
