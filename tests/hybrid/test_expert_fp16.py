"""Spread experts in fp16: the gradients of one process by parameter, and an overflow of one rank skips all steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expert_models import batch_of, make, make_optimizer

from booster_core import Booster
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_core.state import NamedTensors
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks

SCALE = 2.0**10
OPTIONS = [
    {"ep_size": 2},
    {"ep_size": 2, "zero_stage": 1},
    {"ep_size": 2, "zero_stage": 2},
    pytest.param({"ep_size": 2, "zero_stage": 3}, marks=pytest.mark.slow, id="zero3"),
]


def boosted(name, options):
    precision = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=SCALE))
    booster = Booster("cpu", precision, HybridParallelPlugin(**options))
    model = make(name, dtype=torch.float32)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def values(model):
    return {name: tensor.detach().clone() for name, tensor in NamedTensors.of(model.unwrap()).tensors.items()}


def overflow(options, bad_rank):
    booster, model, optimizer = boosted("qwen3_moe", options)
    before = values(model)
    rank = dist.get_rank()
    loss = model(**batch_of(0, rank)).loss
    booster.backward(loss * float("inf") if rank == bad_rank else loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == SCALE / 2
    for key, tensor in values(model).items():
        assert torch.equal(tensor, before[key]), key
    booster.backward(model(**batch_of(1, rank)).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == SCALE / 2
    after = values(model)
    assert any(not torch.equal(after[key], before[key]) for key in before if "experts" in key)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("options", OPTIONS[:3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(options, bad_rank):
    run_on_ranks(overflow, 2, options, bad_rank)


def overflow_of_an_expert():
    """One rank's experts alone get infinite gradients: none of the others' tokens or parameters does."""
    booster, model, optimizer = boosted("qwen3_moe", {"ep_size": 2})
    rank = dist.get_rank()
    before = values(model)
    if rank == 1:
        experts = next(each for key, each in model.unwrap().named_parameters() if "experts.down_proj" in key)
        experts.register_hook(lambda gradient: gradient * float("inf"))
    booster.backward(model(**batch_of(0, rank)).loss, optimizer)
    optimizer.step()
    assert optimizer.loss_scaler.scale == SCALE / 2
    for key, tensor in values(model).items():
        assert torch.equal(tensor, before[key]), key


def test_an_overflow_in_one_ranks_experts_skips_the_step_on_all():
    run_on_ranks(overflow_of_an_expert, 2)
