"""Experts spread over ranks give one process's gradients, norms and steps on every mesh, in fp64."""

import pytest
import torch
from cases import Setting, assert_equals_one_process, train_boosted, train_plainly
from expert_models import MODELS, expert_case, make
from matrix import matrix
from ranked import on_ranks

from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for


def assert_parity(name, options, num_ranks=2, settings=None, **changes):
    """Compare with one process; return the shapes of what each rank has of the experts."""
    setting = Setting(HybridParallelPlugin, options, num_ranks)
    return assert_equals_one_process(expert_case(name, settings=settings, **changes), setting, tell=parts_of_experts)


def parts_of_experts(_booster, model, _optimizer):
    inside = model.unwrap()
    return [tuple(each.shape) for key, each in inside.named_parameters() if "experts.gate_up_proj" in key]


@matrix(["mixtral", "glm4_moe"], name=list(MODELS))
def test_gradients_norms_and_steps_are_those_of_one_process(name):
    for shapes in assert_parity(name, {"ep_size": 2}):
        assert {shape[0] for shape in shapes} == {4}


@matrix(["llama4"], name=list(MODELS))
def test_experts_that_tensor_parallel_ranks_split_give_those_of_one_process(name):
    assert_parity(name, {"tp_size": 2})


MESHES = {
    "dp2": (4, {"ep_size": 2}),
    "zero1": (2, {"ep_size": 2, "zero_stage": 1}),
    "zero2": (2, {"ep_size": 2, "zero_stage": 2}),
    "dp2zero1": (4, {"ep_size": 2, "zero_stage": 1}),
    "dp2zero2": (4, {"ep_size": 2, "zero_stage": 2}),
    "dp2zero3": (4, {"ep_size": 2, "zero_stage": 3}),
    "dp2outside": (4, {"ep_size": 2, "tp_size": 2, "mesh_order": ("pp", "sp", "tp", "dp")}),
    "tp2": (4, {"ep_size": 2, "tp_size": 2}),
    "tp2zero1": (4, {"ep_size": 2, "tp_size": 2, "zero_stage": 1}),
    "tp2zero3": (4, {"ep_size": 2, "tp_size": 2, "zero_stage": 3}),
    "tp2split": (4, {"ep_size": 2, "tp_size": 2, "sequence_parallelism_mode": "split_gather"}),
    "pp2": (4, {"ep_size": 2, "pp_size": 2}),
    "pp2zero2": (4, {"ep_size": 2, "pp_size": 2, "zero_stage": 2}),
    "pp2zero3": (4, {"ep_size": 2, "pp_size": 2, "zero_stage": 3}),
    "zbv": (4, {"ep_size": 2, "pp_size": 2, "pp_style": "zbv", "num_layers_per_stage": [1, 1, 1, 1]}),
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
    1,
    name=["qwen3_moe", "deepseek_v3"],
    mesh=list(MESHES),
)
def test_every_mesh_gives_the_gradients_of_one_process(name, mesh):
    num_ranks, options = MESHES[mesh]
    settings = {"num_hidden_layers": 4} if mesh in ("zbv", "interleaved") else {}
    assert_parity(name, options, num_ranks, settings)


@matrix(
    ["deepseek_v3-options0"],
    name=["deepseek_v3", "gpt_oss"],
    options=[
        {"ep_size": 2},
        {"ep_size": 4},
        {"ep_size": 2, "zero_stage": 2},
        {"ep_size": 2, "zero_stage": 3},
    ],
)
def test_ranks_whose_experts_no_token_chooses_take_part(name, options):
    """All tokens choose the first two experts: the other ranks' experts get none, and a gradient of zero."""
    assert_parity(name, options, 4, {"one_sided": True})


@matrix(["0"], stage=[0, 1, 2, 3])
def test_gradients_accumulate(stage):
    assert_parity("qwen3_moe", {"ep_size": 2, "zero_stage": stage}, 4, steps=1, micro_batches=3)


@matrix(1, name=["deepseek_v3", "gpt_oss"], one_sided=[True, False], reentrant=[False, True])
@on_ranks(2)
def test_recomputed_layers_send_tokens_again(name, one_sided, reentrant):
    def recomputing():
        model = make(name, one_sided=one_sided)
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        return model

    assert_parity(name, {"ep_size": 2}, steps=1, build=recomputing)


def test_recomputed_layers_of_stages_send_tokens_again():
    options = {"ep_size": 2, "pp_size": 2, "checkpoint_ratio": 1.0}
    assert_parity("deepseek_v3", options, 4, {"one_sided": True}, steps=1)


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks("num_ranks")
def test_experts_that_the_optimizer_does_not_hold_have_gradients(num_ranks):
    def over_others(model):
        """Return an optimizer that leaves out some experts and a gate."""
        left_out = ("layers.0.mlp.experts", "layers.1.mlp.gate")
        held = [p for key, p in model.named_parameters() if not any(part in key for part in left_out)]
        return torch.optim.SGD(held, lr=0.1)

    assert_parity("qwen3_moe", {"ep_size": 2}, num_ranks, steps=1, optimizer=over_others, max_norm=None)


IN_FP32 = {"dtype": torch.float32}
"""On transformers' grouped kernel."""


@matrix(["0"], stage=[0, 1, 3])
def test_bf16_stays_near_fp32(stage):
    case = expert_case("qwen3_moe", settings=IN_FP32)
    setting = Setting(HybridParallelPlugin, {"ep_size": 2, "zero_stage": stage}, 2, "bf16")
    for result in run_on_ranks(train_boosted, 2, case, setting):
        # bf16 keeps 8 bits, and a token on the edge may choose another expert.
        assert result.trained.norms == pytest.approx(train_plainly(case, 2).norms, rel=5e-2)


def test_the_grouped_kernel_computes_spread_experts():
    assert_parity("qwen3_moe", {"ep_size": 2}, settings=IN_FP32, tolerance=tolerance_for(torch.float32))
