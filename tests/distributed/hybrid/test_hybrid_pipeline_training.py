"""Models that are cut into pipeline stages train, through the plugin, as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from model_zoo import get_model

from booster_core import Booster
from booster_core.testing import run_on_ranks
from booster_core.testing.training import whole_model

STEPS = 3
SAMPLES = 4
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}
"""fp32, sums in another order; AdamW's epsilon keeps small gradients' rounding small."""


def make(name):
    model = get_model(name).seeded()
    decay = [p for n, p in model.named_parameters() if p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}], lr=1e-3, eps=1e-3
    )
    return model, optimizer


def plainly(name, data_size, microbatches):
    """Train in one process: each data rank's batch in the same microbatches, as losses may couple samples."""
    zoo = get_model(name)
    model, optimizer = make(name)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(data_size):
            batch = zoo.share(step, rank, SAMPLES)
            for part in parts_of(batch, microbatches):
                loss = zoo.loss_of(model, part) / microbatches / data_size
                loss.backward()
                total += loss.item()
        losses.append(total)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, norms, gradients


def parts_of(batch, count):
    size = SAMPLES // count
    return [{key: value[start : start + size] for key, value in batch.items()} for start in range(0, SAMPLES, size)]


def compare(name, options):
    from booster_hybrid import HybridParallelPlugin

    zoo = get_model(name)
    plugin = HybridParallelPlugin(**options, example_batch=zoo.share(0, 0, 2))
    booster = Booster(plugin=plugin)
    model, optimizer = make(name)
    model, optimizer, *_ = booster.boost(model, optimizer)
    data_rank, data_size = plugin.data_parallel_coordinates(booster.context)
    expected, losses, norms, gradients = plainly(name, data_size, 2)
    for step in range(STEPS):
        result = booster.execute_pipeline(
            iter([zoo.share(step, data_rank, SAMPLES)]), model, zoo.loss, optimizer, return_loss=True
        )
        for key, gradient in gradients[step].items():
            torch.testing.assert_close(booster.full_gradient(model, key), gradient, **TOLERANCE, msg=key)
        assert float(optimizer.clip_grad_by_norm(0.5)) == pytest.approx(norms[step], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, None if result["loss"] is None else float(result["loss"]))
        found = [loss for loss in found if loss is not None]
        assert sum(found) / len(found) == pytest.approx(losses[step], rel=1e-5)
    whole = whole_model(booster, model)
    for key, parameter in expected.named_parameters():
        torch.testing.assert_close(whole[key], parameter.detach(), **TOLERANCE, msg=key)


MESHES = {
    "pp2": (2, {"pp_size": 2}),
    "pp2dp2": (4, {"pp_size": 2}),
    "pp2dp2zero1": (4, {"pp_size": 2, "zero_stage": 1}),
    "pp2dp2zero2": (4, {"pp_size": 2, "zero_stage": 2}),
    "tp2pp2": (4, {"pp_size": 2, "tp_size": 2}),
    "sp2pp2": (4, {"pp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "all_to_all"}),
    "ring2pp2": (4, {"pp_size": 2, "sp_size": 2, "sequence_parallelism_mode": "ring_attn"}),
    "split2pp2": (4, {"pp_size": 2, "tp_size": 2, "sequence_parallelism_mode": "split_gather"}),
}


@pytest.mark.parametrize("name", ["transformers/llama", "transformers/llama_tied", "transformers/gpt2_lm"])
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_norms_and_parameters_are_those_of_one_process(name, mesh):
    num_ranks, options = MESHES[mesh]
    run_on_ranks(compare, num_ranks, name, options)
