"""Spread experts in fp16: the gradients of one process by parameter, and an overflow of one rank skips all steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expert_models import batch_of, make, make_optimizer
from ranked import on_ranks

from booster_core import Booster
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_core.state import NamedTensors
from booster_hybrid import HybridParallelPlugin

SCALE = 2.0**10


def boosted(name, options):
    precision = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=SCALE))
    booster = Booster("cpu", precision, HybridParallelPlugin(**options))
    model = make(name, dtype=torch.float32)
    model, optimizer, *_ = booster.boost(model, make_optimizer(model))
    return booster, model, optimizer


def values(model):
    return {name: tensor.detach().clone() for name, tensor in NamedTensors.of(model.unwrap()).tensors.items()}


@pytest.mark.parametrize(
    ("options", "bad_rank", "where"),
    [
        *(({"ep_size": 2, "zero_stage": stage}, rank, "loss") for stage in (0, 1, 2) for rank in (0, 1)),
        ({"ep_size": 2}, 1, "experts"),
    ],
)
@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(options, bad_rank, where):
    """Let a loss be infinite, or the gradients of one rank's experts: none of the others' tokens or parameters is."""
    booster, model, optimizer = boosted("qwen3_moe", options)
    before = values(model)
    rank = dist.get_rank()
    if rank == bad_rank and where == "experts":
        experts = next(each for key, each in model.unwrap().named_parameters() if "experts.down_proj" in key)
        handle = experts.register_hook(lambda gradient: gradient * float("inf"))
    loss = model(**batch_of(0, rank)).loss
    booster.backward(loss * float("inf") if rank == bad_rank and where == "loss" else loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == SCALE / 2
    for key, tensor in values(model).items():
        assert torch.equal(tensor, before[key]), key
    if rank == bad_rank and where == "experts":
        handle.remove()
    booster.backward(model(**batch_of(1, rank)).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.loss_scaler.scale == SCALE / 2
    after = values(model)
    assert any(not torch.equal(after[key], before[key]) for key in before if "experts" in key)
