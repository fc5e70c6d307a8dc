"""What was trained with experts on some ranks goes on with them on others, and is a folder of transformers."""

from functools import partial

import torch
from cases import Setting, assert_equals_one_process, train_plainly
from expert_models import batch_of, expert_case
from matrix import matrix

from booster_hybrid import HybridParallelPlugin
from booster_testing.compare import assert_same_tensors, tolerance_for


def same_batch_of(number, _replica):
    """Return one batch for all, so that the number of data parallel ranks does not matter."""
    return batch_of(number, 0)


def case_of(name, **changes):
    return expert_case(name, batch=same_batch_of, max_norm=None, **changes)


MESHES = {
    "ep4": {"ep_size": 4},
    "ep2dp2": {"ep_size": 2},
    "ep2dp2zero1": {"ep_size": 2, "zero_stage": 1},
    "ep2dp2zero2": {"ep_size": 2, "zero_stage": 2},
    "ep2dp2zero3": {"ep_size": 2, "zero_stage": 3},
    "ep2tp2": {"ep_size": 2, "tp_size": 2},
    "ep2pp2": {"ep_size": 2, "pp_size": 2},
    "dp4": {},
    "dp4zero1": {"zero_stage": 1},
}
PAIRS = [("ep2dp2", then) for then in MESHES] + [(first, "dp4") for first in MESHES] + [("ep2dp2zero3", "ep2dp2zero2")]
"""Whole experts are read from what each mesh writes, and each mesh reads what one of them does."""


@matrix(["ep2dp2-dp4", "ep2dp2zero3-ep2dp2zero2"], **{"first, then": list(dict.fromkeys(PAIRS))})
def test_any_mesh_goes_on_with_what_another_one_has_saved(first, then, tmp_path):
    settings = [Setting(HybridParallelPlugin, MESHES[mesh], 4) for mesh in (first, then)]
    case = case_of("qwen3_moe", steps=4)
    assert_equals_one_process(case, settings[0], checkpoint=tmp_path / "run", then=settings[1])


def save(folder, booster, model, _optimizer):
    booster.save_model(model, folder, shard=True)


def assert_transformers_reads(folder, case, num_ranks):
    """Save after a training with spread experts, and compare what is read with one process."""
    setting = Setting(HybridParallelPlugin, {"ep_size": 2}, num_ranks)
    assert_equals_one_process(case, setting, tell=partial(save, folder))
    loaded = type(case.build()).from_pretrained(folder, dtype=next(case.build().parameters()).dtype)
    expected = train_plainly(case, num_ranks).parameters
    assert_same_tensors({key: loaded.get_parameter(key).detach() for key in expected}, expected, case.tolerance)


@matrix(["qwen3_moe"], name=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_transformers_reads_what_spread_experts_have_saved(name, tmp_path):
    assert_transformers_reads(tmp_path, case_of(name), 2)


def test_each_rank_writes_a_part_of_large_experts(tmp_path):
    """These are above the size at which one tensor is written by several ranks."""
    sizes = {"moe_intermediate_size": 512, "num_hidden_layers": 1, "dtype": torch.float32}
    case = case_of("qwen3_moe", steps=1, settings=sizes, tolerance=tolerance_for(torch.float32))
    assert_transformers_reads(tmp_path, case, 4)
