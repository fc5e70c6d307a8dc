"""What was trained with experts on some ranks goes on with them on others, or whole, in one process."""

from __future__ import annotations

import pytest
import torch
from cases import train_plainly
from expert_models import batch_of, expert_case
from matrix import matrix

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model


def same_batch_of(number, _replica):
    """Return one batch for all, so that the number of data parallel ranks does not matter."""
    return batch_of(number, 0)


def case_of(name, **changes):
    return expert_case(name, batch=same_batch_of, max_norm=None, **changes)


def boosted(case, options):
    booster = Booster("cpu", plugin=options if options is None else HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(*case.make())
    return booster, model, optimizer


def train(case, booster, model, optimizer, steps):
    for step in steps:
        batch = case.batch(step, 0)
        if getattr(booster.plugin, "pp_size", 1) > 1:
            booster.execute_pipeline(iter([batch]), model, case.loss, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def write(case, options, folder):
    booster, model, optimizer = boosted(case, options)
    train(case, booster, model, optimizer, range(case.steps))
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)


def read(case, options, folder):
    """Load and train the last step."""
    booster, model, optimizer = boosted(case, options)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    train(case, booster, model, optimizer, [case.steps - 1])
    return whole_model(booster, model)


MESHES = {
    "ep2": (2, {"ep_size": 2}),
    "ep4": (4, {"ep_size": 4}),
    "ep2dp2": (4, {"ep_size": 2}),
    "ep2zero1": (2, {"ep_size": 2, "zero_stage": 1}),
    "ep2dp2zero2": (4, {"ep_size": 2, "zero_stage": 2}),
    "ep2dp2zero3": (4, {"ep_size": 2, "zero_stage": 3}),
    "ep2tp2": (4, {"ep_size": 2, "tp_size": 2}),
    "ep2pp2": (4, {"ep_size": 2, "pp_size": 2}),
    "dp2": (2, {}),
    "zero1": (2, {"zero_stage": 1}),
    "alone": (1, {}),
}
PAIRS = [(writes, "alone") for writes in MESHES if writes not in ("ep2zero1", "zero1", "alone")]
PAIRS += [("ep2dp2zero3", "ep2dp2zero2"), *(("ep2dp2", reads) for reads in MESHES if reads != "alone")]
"""One process reads what each mesh writes, and each mesh what one of them does."""


@matrix(["ep2dp2-alone", "ep2dp2zero3-ep2dp2zero2"], **{"writes, reads": PAIRS})
def test_any_mesh_goes_on_with_what_another_one_has_saved(writes, reads, tmp_path):
    run_on_ranks(write, MESHES[writes][0], case_of("qwen3_moe"), MESHES[writes][1], tmp_path)
    case = case_of("qwen3_moe", steps=3)
    expected = train_plainly(case, 1).parameters
    for whole in run_on_ranks(read, MESHES[reads][0], case, MESHES[reads][1], tmp_path):
        assert_same_tensors({key: whole[key] for key in expected}, expected, case.tolerance)


def assert_transformers_reads(folder, case):
    loaded = type(case.build()).from_pretrained(folder / "model", dtype=next(case.build().parameters()).dtype)
    expected = train_plainly(case, 1).parameters
    assert_same_tensors({key: loaded.get_parameter(key).detach() for key in expected}, expected, case.tolerance)


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow), pytest.param("gpt_oss", marks=pytest.mark.slow)],
)
def test_transformers_reads_what_spread_experts_have_saved(name, tmp_path):
    run_on_ranks(write, 2, case_of(name), {"ep_size": 2}, tmp_path)
    assert_transformers_reads(tmp_path, case_of(name))


def test_each_rank_writes_a_part_of_large_experts(tmp_path):
    """These are above the size at which one tensor is written by several ranks."""
    sizes = {"moe_intermediate_size": 512, "num_hidden_layers": 1, "dtype": torch.float32}
    case = case_of("qwen3_moe", steps=1, settings=sizes, tolerance=tolerance_for(torch.float32))
    run_on_ranks(write, 4, case, {"ep_size": 2}, tmp_path)
    assert_transformers_reads(tmp_path, case)
