"""Experts spread over ranks give one process's gradients, norms and steps on every mesh, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expert_models import MAX_NORM, MODELS, assert_same_gradients, batch_of, make, make_optimizer, train_plainly
from matrix import matrix

from booster_core import Booster
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_zero import ZeroConfig

STEPS = 2
"""The gradients of the second step show whether the first one changed every parameter as it should."""


def boosted(model, options):
    from booster_hybrid import HybridParallelPlugin

    plugin = HybridParallelPlugin(**options)
    booster = Booster("cpu", plugin=plugin)
    data_rank, data_size = plugin.data_parallel_coordinates(booster.context.coordinator)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer, data_rank, data_size


def loss_of(outputs, batch):
    del batch
    return outputs.loss


def step_backward(booster, model, optimizer, batch):
    if booster.plugin.pp_size > 1:
        booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
    else:
        booster.backward(model(**batch).loss, optimizer)


def compare(name, options, settings=None):
    settings = settings or {}
    booster, model, optimizer, data_rank, data_size = boosted(make(name, **settings), options)
    expected = train_plainly(make(name, **settings), STEPS, data_size)
    for step in range(STEPS):
        step_backward(booster, model, optimizer, batch_of(step, data_rank))
        gradients = expected.gradients[step]
        found = {key: full_gradient(booster, model, key) for key in gradients}
        assert_same_gradients(found, gradients, f"{name} step {step}")
        assert float(optimizer.clip_grad_by_norm(MAX_NORM)) == pytest.approx(expected.norms[step], rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    return parts_of_experts(model)


def parts_of_experts(model):
    """Return the shapes of what is here of the experts."""
    inside = model.unwrap()
    return [tuple(each.shape) for key, each in inside.named_parameters() if "experts.gate_up_proj" in key]


@matrix(["mixtral", "glm4_moe"], name=list(MODELS))
def test_gradients_norms_and_steps_are_those_of_one_process(name):
    for shapes in run_on_ranks(compare, 2, name, {"ep_size": 2}):
        assert {shape[0] for shape in shapes} == {4}


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3_moe", marks=pytest.mark.slow), "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)],
)
def test_one_or_two_experts_are_on_each_of_four_ranks(name):
    for shapes in run_on_ranks(compare, 4, name, {"ep_size": 4}):
        assert {shape[0] for shape in shapes} == {2}


MESHES = {
    "dp2": (4, {"ep_size": 2}),
    "zero1": (2, {"ep_size": 2, "zero_stage": 1}),
    "zero2": (2, {"ep_size": 2, "zero_stage": 2}),
    "dp2zero1": (4, {"ep_size": 2, "zero_stage": 1}),
    "dp2zero2": (4, {"ep_size": 2, "zero_stage": 2}),
    "dp2zero3": (4, {"ep_size": 2, "zero_stage": 3}),
    "dp2options": (
        4,
        {"ep_size": 2, "zero": ZeroConfig(stage=2, bucket_bytes=4096, overlap_communication=False)},
    ),
    "dp2whole": (4, {"ep_size": 2, "zero": ZeroConfig(stage=1, partition="parameter")}),
    "dp2outside": (4, {"ep_size": 2, "tp_size": 2, "mesh_order": ("pp", "sp", "tp", "dp")}),
    "tp2": (4, {"ep_size": 2, "tp_size": 2}),
    "tp2zero1": (4, {"ep_size": 2, "tp_size": 2, "zero_stage": 1}),
    "tp2zero3": (4, {"ep_size": 2, "tp_size": 2, "zero_stage": 3}),
    "tp2split": (4, {"ep_size": 2, "tp_size": 2, "sequence_parallelism_mode": "split_gather"}),
    "pp2": (4, {"ep_size": 2, "pp_size": 2}),
    "pp2zero2": (4, {"ep_size": 2, "pp_size": 2, "zero_stage": 2}),
    "pp2zero3": (4, {"ep_size": 2, "pp_size": 2, "zero_stage": 3}),
    "zbv": (4, {"ep_size": 2, "pp_size": 2, "pp_style": "zbv", "num_layers_per_stage": [1, 1, 1, 1]}),
    "gpipe": (4, {"ep_size": 2, "pp_size": 2, "pp_style": "gpipe"}),
    "interleaved": (4, {"ep_size": 2, "pp_size": 2, "pp_style": "interleaved", "num_layers_per_stage": [1, 1, 1, 1]}),
    "ulysses": (4, {"ep_size": 2, "sp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "ring": (4, {"ep_size": 2, "sp_size": 2, "sequence_parallelism_mode": "ring_attn", "zero_stage": 1}),
}


@matrix(
    [
        "qwen3_moe-tp2zero1",
        "qwen3_moe-zbv",
        "deepseek_v3-dp2zero3",
        "deepseek_v3-ulysses",
    ],
    name=["qwen3_moe", "deepseek_v3"],
    mesh=list(MESHES),
)
def test_every_mesh_gives_the_gradients_of_one_process(name, mesh):
    num_ranks, options = MESHES[mesh]
    settings = {"num_hidden_layers": 4} if mesh in ("zbv", "interleaved") else {}
    run_on_ranks(compare, num_ranks, name, options, settings)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 1, "zero_stage": 2}])
def test_eight_ranks_combine_three_axes(options):
    run_on_ranks(compare, 8, "qwen3_moe", {"ep_size": 2, **options}, timeout_seconds=180.0)


@matrix(
    ["deepseek_v3-options0"],
    name=["deepseek_v3", "gpt_oss"],
    options=[
        {"ep_size": 2},
        {"ep_size": 4},
        {"ep_size": 2, "zero_stage": 2},
        pytest.param({"ep_size": 2, "zero_stage": 3}, marks=pytest.mark.slow, id="zero3"),
    ],
)
def test_ranks_whose_experts_no_token_chooses_take_part(name, options):
    """All tokens choose the first two experts: the other ranks' experts get none, and a gradient of zero."""
    run_on_ranks(compare, 4, name, options, {"one_sided": True})


def accumulate(options):
    """Add up two batches under `no_sync`, and a third outside of it."""
    booster, model, optimizer, data_rank, data_size = boosted(make("qwen3_moe"), options)
    expected = train_plainly(make("qwen3_moe"), 1, data_size, backwards=3)
    for part in range(2):
        with booster.no_sync(model, optimizer):
            booster.backward(model(**batch_of(part, data_rank)).loss, optimizer)
    booster.backward(model(**batch_of(2, data_rank)).loss, optimizer)
    gradients = expected.gradients[0]
    assert_same_gradients({key: full_gradient(booster, model, key) for key in gradients}, gradients)
    assert float(optimizer.clip_grad_by_norm(MAX_NORM)) == pytest.approx(expected.norms[0], rel=1e-6)


@pytest.mark.parametrize(
    "stage",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow, id="zero3"),
    ],
)
def test_gradients_accumulate(stage):
    run_on_ranks(accumulate, 4, {"ep_size": 2, "zero_stage": stage})


def recompute(name, one_sided, reentrant):
    model = make(name, one_sided=one_sided)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    booster, model, optimizer, data_rank, data_size = boosted(model, {"ep_size": 2})
    gradients = train_plainly(make(name, one_sided=one_sided), 1, data_size).gradients[0]
    booster.backward(model(**batch_of(0, data_rank)).loss, optimizer)
    assert_same_gradients({key: full_gradient(booster, model, key) for key in gradients}, gradients)


@matrix(1, name=["deepseek_v3", "gpt_oss"], one_sided=[True, False], reentrant=[False, True])
def test_recomputed_layers_send_tokens_again(name, one_sided, reentrant):
    run_on_ranks(recompute, 2, name, one_sided, reentrant)


def recompute_stages():
    booster, model, optimizer, data_rank, data_size = boosted(
        make("deepseek_v3", one_sided=True), {"ep_size": 2, "pp_size": 2, "checkpoint_ratio": 1.0}
    )
    gradients = train_plainly(make("deepseek_v3", one_sided=True), 1, data_size).gradients[0]
    step_backward(booster, model, optimizer, batch_of(0, data_rank))
    assert_same_gradients({key: full_gradient(booster, model, key) for key in gradients}, gradients)


def test_recomputed_layers_of_stages_send_tokens_again():
    run_on_ranks(recompute_stages, 4)


def without_an_optimizer():
    """Parameters that no optimizer holds have gradients of their own memory."""
    from booster_hybrid import HybridParallelPlugin

    whole = make("qwen3_moe")
    frozen = [key for key, _ in whole.named_parameters() if "layers.0.mlp.experts" in key or "layers.1.mlp.gate" in key]
    model = make("qwen3_moe")
    held = [parameter for key, parameter in model.named_parameters() if key not in frozen]
    booster = Booster("cpu", plugin=HybridParallelPlugin(ep_size=2))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(held, lr=0.1))
    gradients = train_plainly(whole, 1, dist.get_world_size()).gradients[0]
    booster.backward(model(**batch_of(0, dist.get_rank())).loss, optimizer)
    assert_same_gradients({key: full_gradient(booster, model, key) for key in gradients}, gradients)


def test_experts_that_the_optimizer_does_not_hold_have_gradients():
    run_on_ranks(without_an_optimizer, 2)
    run_on_ranks(without_an_optimizer, 4)


def narrow(options):
    """Train in bf16, on transformers' grouped kernel."""
    from booster_hybrid import HybridParallelPlugin

    whole = make("qwen3_moe", dtype=torch.float32)
    expected = train_plainly(whole, 2, dist.get_world_size())
    model = make("qwen3_moe", dtype=torch.float32)
    booster = Booster("cpu", "bf16", HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    norms = []
    for step in range(2):
        booster.backward(model(**batch_of(step, dist.get_rank())).loss, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    # bf16 keeps 8 bits, and a token on the edge may choose another expert.
    assert norms == pytest.approx(expected.norms, rel=5e-2)


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow, id="zero3")]
)
def test_bf16_stays_near_fp32(stage):
    run_on_ranks(narrow, 2, {"ep_size": 2, "zero_stage": stage})


def grouped(options):
    """Compare in fp32 on transformers' grouped kernel."""
    booster, model, optimizer, data_rank, data_size = boosted(make("qwen3_moe", dtype=torch.float32), options)
    expected = train_plainly(make("qwen3_moe", dtype=torch.float32), 1, data_size)
    booster.backward(model(**batch_of(0, data_rank)).loss, optimizer)
    for key, gradient in expected.gradients[0].items():
        torch.testing.assert_close(full_gradient(booster, model, key), gradient, rtol=1e-4, atol=2e-6, msg=key)


def test_the_grouped_kernel_computes_spread_experts():
    run_on_ranks(grouped, 2, {"ep_size": 2})
