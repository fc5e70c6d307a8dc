"""What was trained with experts on some ranks goes on with them on others, or whole, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expert_models import batch_of, make, make_optimizer
from matrix import matrix

from booster_core import Booster
from booster_testing import run_on_ranks

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def boosted(name, options):
    from booster_hybrid import HybridParallelPlugin

    plugin = HybridParallelPlugin(**options) if options is not None else None
    booster = Booster("cpu", plugin=plugin)
    model = make(name)
    if options is None:  # one process
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    index = 0 if plugin is None else plugin.data_parallel_coordinates(booster.context.coordinator)[0]
    return booster, model, optimizer, index


def train(booster, model, optimizer, index, steps):
    """Train on one batch for all, so that the number of data parallel ranks does not matter."""
    del index
    for step in steps:
        batch = batch_of(step, 0)
        if booster.plugin is not None and getattr(booster.plugin, "pp_size", 1) > 1:
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def write(name, options, folder):
    booster, model, optimizer, index = boosted(name, options)
    train(booster, model, optimizer, index, range(2))
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)


def plain(name, steps):
    model = make(name)
    optimizer = make_optimizer(model)
    for step in range(steps):
        model(**batch_of(step, 0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def read(name, options, folder, steps=3):
    """Load, train one more step, and compare with three steps in one process."""
    booster, model, optimizer, index = boosted(name, options)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    train(booster, model, optimizer, index, range(2, steps))
    expected = dict(plain(name, steps).named_parameters())
    seen = set()
    for shard in booster.state_adapter(model).model_shards():
        if shard.name in expected:
            seen.add(shard.name)
            whole = expected[shard.name].detach()[tuple(slice(*span) for span in shard.box)].reshape(-1)
            start, stop = shard.flat_range
            found = shard.data.detach().reshape(-1)
            torch.testing.assert_close(found, whole[start:stop], rtol=1e-5, atol=1e-7, msg=shard.name)
    everywhere = [seen]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, seen)
    assert set().union(*everywhere) == expected.keys()
    if options is None or (options.get("zero_stage", 0) < 3 and options.get("pp_size", 1) == 1):
        assert seen == expected.keys(), "ranks hold all parameters"


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


@matrix(
    ["ep2dp2-alone", "ep2dp2zero3-ep2dp2zero2"],
    writes=["ep2", "ep4", "ep2dp2", "ep2dp2zero2", "ep2dp2zero3", "ep2tp2", "ep2pp2", "dp2"],
    reads=list(MESHES),
)
def test_any_mesh_goes_on_with_what_another_one_has_saved(writes, reads, tmp_path):
    run_on_ranks(write, MESHES[writes][0], "qwen3_moe", MESHES[writes][1], tmp_path)
    run_on_ranks(read, MESHES[reads][0], "qwen3_moe", MESHES[reads][1], tmp_path)


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow), pytest.param("gpt_oss", marks=pytest.mark.slow)],
)
def test_transformers_reads_what_spread_experts_have_saved(name, tmp_path):
    run_on_ranks(write, 2, name, {"ep_size": 2}, tmp_path)
    expected = plain(name, 2)
    loaded = type(expected).from_pretrained(tmp_path / "model", dtype=torch.float64)
    for key, parameter in expected.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(key), parameter, rtol=1e-5, atol=1e-7, msg=key)


def write_large(folder):
    """Save experts above the size at which one tensor is written by several ranks."""
    booster, model, optimizer, _ = boosted_large({"ep_size": 2})
    booster.backward(model(**batch_of(0, 0)).loss, optimizer)
    optimizer.step()
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)


def boosted_large(options):
    from booster_hybrid import HybridParallelPlugin

    booster = Booster("cpu", plugin=HybridParallelPlugin(**options))
    model = large()
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer, 0


def large():
    return make("qwen3_moe", moe_intermediate_size=512, num_hidden_layers=1, dtype=torch.float32)


def test_each_rank_writes_a_part_of_large_experts(tmp_path):
    run_on_ranks(write_large, 4, tmp_path)
    model = large()
    optimizer = make_optimizer(model)
    model(**batch_of(0, 0)).loss.backward()
    optimizer.step()
    loaded = type(model).from_pretrained(tmp_path / "model")
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(key), parameter, rtol=1e-4, atol=1e-6, msg=key)


def steps_after_laying_out_again():
    """Give ranks' experts other step counts, lay out in another order, and return counts of experts and of the rest."""
    booster, model, optimizer, index = boosted("qwen3_moe", {"ep_size": 2, "zero_stage": 1})
    train(booster, model, optimizer, index, range(2))
    layout = optimizer.layout
    for number, state in optimizer.hosted.states().items():
        state["step"].fill_(3.0 if layout.ranks_of(number) == layout.ranks else 10.0 + dist.get_rank())
    optimizer.engine.rebuild(layout.order()[::-1])
    found = {True: set(), False: set()}
    for number, state in optimizer.hosted.states().items():
        found[layout.ranks_of(number) == layout.ranks].add(state["step"].item())
    return found


def test_experts_of_other_ranks_keep_their_own_step_counts():
    for rank, found in enumerate(run_on_ranks(steps_after_laying_out_again, 2)):
        assert found == {True: {3.0}, False: {10.0 + rank}}
