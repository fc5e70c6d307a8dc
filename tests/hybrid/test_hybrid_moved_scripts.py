"""A fine-tuning script as Colossal-AI's users write them, with what it asks of its plugin; and what the answers are."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from matrix import matrix, named

from booster_core import Booster, DistCoordinator
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.mesh import PipelinePosition
from booster_runtime import LazyInitContext
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

SAMPLES, BATCH, LENGTH = 8, 4, 8


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_embd": 16, "n_head": 2, "n_positions": LENGTH}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_layer=4, **sizes, **dropouts))


def samples():
    rows = torch.randint(32, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]


def finetune(plugin, *, is_lazy=False):
    """Train for an epoch and evaluate; return what the script would print, and the whole parameters."""
    coordinator = DistCoordinator()
    booster = Booster("cpu", plugin=plugin)
    dataloader = plugin.prepare_dataloader(samples(), batch_size=BATCH, shuffle=False)
    lazy = isinstance(plugin, HybridParallelPlugin) and is_lazy
    with LazyInitContext(default_device=booster.device) if lazy else nullcontext():
        model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    def criterion(outputs, _):
        return outputs.loss

    model, optimizer, criterion, dataloader, scheduler = booster.boost(
        model, optimizer, criterion, dataloader, scheduler
    )
    use_pipeline = isinstance(booster.plugin, HybridParallelPlugin) and booster.plugin.pp_size > 1
    is_last = use_pipeline and booster.plugin.stage_manager.is_last_stage(ignore_chunk=True)
    prints = is_last if use_pipeline else coordinator.is_master()
    printed = []
    model.train()
    batches = iter(dataloader)
    for _ in range(len(dataloader)):
        if use_pipeline:
            outputs = booster.execute_pipeline(batches, model, criterion, optimizer, return_loss=True)
            if is_last:
                printed.append(outputs["loss"].item())
        else:
            loss = model(**next(batches)).loss
            booster.backward(loss, optimizer)
            if prints:
                printed.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    total = torch.zeros(())
    batches = iter(dataloader)
    for _ in range(len(dataloader)):
        with torch.no_grad():
            if use_pipeline:
                outputs = booster.execute_pipeline(batches, model, criterion, return_loss=True, return_outputs=True)
                objects = [outputs["loss"]] if is_last else [None]
                if is_last:
                    assert outputs["outputs"].logits.shape[1:] == (LENGTH, 32)
                last = dist.get_process_group_ranks(plugin.pp_group)[-1]
                dist.broadcast_object_list(objects, src=last, group=plugin.pp_group)
                total += objects[0]
            else:
                total += model(**next(batches)).loss
    dist.all_reduce(total, group=plugin.dp_group)
    return printed, float(total) / plugin.dp_size, whole_model(booster, model)


def plainly():
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    rows = torch.stack([sample["input_ids"] for sample in samples()]).split(BATCH)
    losses = []
    for batch in rows:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        return losses, float(sum(model(input_ids=batch, labels=batch).loss for batch in rows)), model.state_dict()


def compare(options, *, is_lazy):
    printed, total, parameters = finetune(HybridParallelPlugin(**options), is_lazy=is_lazy)
    losses, expected, whole = plainly()
    assert total == pytest.approx(expected, rel=1e-5)
    assert_same_tensors({name: parameters[name] for name in whole}, whole, tolerance_for(torch.float32))
    return printed and (printed == pytest.approx(losses, rel=1e-5))


@matrix(
    ["tp2-lazy"],
    **{
        "options, printing": named(
            [({"pp_size": 2, "num_microbatches": 2, "zero_stage": 1}, 1), ({"tp_size": 2}, 0)],
            ["pp2", "tp2"],
            joint=True,
        )
    },
    is_lazy=named([False, True], ["eager", "lazy"]),
)
def test_a_moved_script_trains_as_one_process(options, printing, is_lazy):
    results = run_on_ranks(compare, 2, options, is_lazy=is_lazy)
    assert results[printing] is True
    assert results[1 - printing] == []


def answers(options):
    """Return what a plugin says of each rank, after the model was boosted."""
    plugin = HybridParallelPlugin(**options)
    finetune(plugin)
    manager = plugin.stage_manager
    assert plugin.coordinates["dp"] == dist.get_process_group_ranks(plugin.dp_group).index(dist.get_rank())
    return {
        "sizes": (plugin.dp_size, plugin.pp_size, plugin.sp_size, plugin.tp_size, plugin.zero_stage),
        "stage": manager and (manager.stage, manager.num_stages, manager.is_first_stage(), manager.is_last_stage()),
        **{
            axis: tuple(dist.get_process_group_ranks(getattr(plugin, f"{axis}_group")))
            for axis in ("dp", "pp", "sp", "tp")
        },
    }


def test_sizes_groups_and_stages_are_those_of_the_mesh():
    found = run_on_ranks(answers, 4, {"pp_size": 2, "zero_stage": 1, "num_microbatches": 2})
    assert [each["sizes"] for each in found] == [(2, 2, 1, 1, 1)] * 4
    assert [each["stage"] for each in found] == [(0, 2, True, False), (1, 2, False, True)] * 2
    assert [each["pp"] for each in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [each["dp"] for each in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [each["tp"] for each in found] == [each["sp"] for each in found] == [(rank,) for rank in range(4)]
    found = run_on_ranks(answers, 2, {"tp_size": 2})
    assert [(each["sizes"], each["stage"], each["tp"]) for each in found] == [((1, 1, 1, 2, 0), None, (0, 1))] * 2


def last_of(style):
    return HybridParallelPlugin(pp_size=2, pp_style=style).stage_manager.is_last_stage()


@pytest.mark.parametrize(("style", "expected"), [("interleaved", [False, True]), ("zbv", [True, False])])
def test_the_last_stage_is_on_the_rank_that_gets_the_loss(style, expected):
    assert run_on_ranks(last_of, 2, style) == expected


@pytest.mark.parametrize("name", ["dp_size", "coordinates", "stage_manager"])
def test_mesh_attributes_need_the_process_group(name):
    with pytest.raises(ConfigError, match=rf"`plugin\.{name}` needs the process group. Ask for it after `launch"):
        getattr(HybridParallelPlugin(pp_size=2), name)


def ask_early(name):
    getattr(HybridParallelPlugin(), name)


@matrix(["pp_group"], name=["dp_group", "tp_group", "pp_group", "sp_group"])
def test_groups_are_refused_before_a_model_is_boosted(name):
    expect_on_ranks(ConfigError, rf"`plugin\.{name}` is made when a model is boosted", ask_early, 2, name)


def test_what_a_script_can_not_see_of_chunks_is_refused():
    position = PipelinePosition(stage=0, num_stages=2, first=0, last=1)
    for ask in (position.is_first_stage, position.is_last_stage):
        with pytest.raises(ConfigError, match="the answer is about all stages of this rank"):
            ask(ignore_chunk=False)
