"""Sequences split over ranks: models train as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from model_zoo import get_model

from booster_core import Booster
from booster_core.testing import run_on_ranks
from booster_core.testing.training import whole_model

STEPS = 3
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


def batch_of(name, step, data_size, data_rank=None, length=8, padding=None):
    """Return a batch of whole sequences, of other lengths than the zoo's, with labels that are unevenly masked."""
    generator = torch.Generator().manual_seed(step)
    samples = 2 * data_size
    tokens = torch.randint(3, 64, (samples, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][:, : length // 3] = -100
    if padding is not None:
        mask = torch.ones_like(tokens)
        for sample in range(samples):
            hidden = 1 + sample % 3
            mask[sample, slice(-hidden, None) if padding == "right" else slice(0, hidden)] = 0
        batch["labels"][mask == 0] = -100
        batch["attention_mask"] = mask
    if data_rank is None:
        return batch
    return {key: value[data_rank::data_size] for key, value in batch.items()}


def compare(name, options, length, padding):
    from booster_hybrid import HybridParallelPlugin

    plugin = HybridParallelPlugin(**options)
    booster = Booster(plugin=plugin)
    model, optimizer = make(name)
    model, optimizer, *_ = booster.boost(model, optimizer)
    parts = options.get("tp_size", 1) * options.get("sp_size", 1)
    data_size, data_rank = dist.get_world_size() // parts, dist.get_rank() // parts
    expected, plain = make(name)
    for step in range(STEPS):
        whole = batch_of(name, step, data_size, None, length, padding)
        share = {key: value[data_rank::data_size] for key, value in whole.items()}
        loss = (
            sum(expected(**{k: v[r::data_size] for k, v in whole.items()}).loss for r in range(data_size)) / data_size
        )
        loss.backward()
        found = model(**share)
        booster.backward(found.loss, optimizer)
        mean = found.loss.detach().clone()
        dist.all_reduce(mean)
        assert float(mean) / dist.get_world_size() == pytest.approx(loss.item(), rel=1e-5)
        for key, parameter in expected.named_parameters():
            torch.testing.assert_close(booster.full_gradient(model, key), parameter.grad, **TOLERANCE, msg=key)
        norm = float(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5))
        assert float(optimizer.clip_grad_by_norm(0.5)) == pytest.approx(norm, rel=1e-5)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    found = whole_model(booster, model)
    for key, parameter in expected.named_parameters():
        torch.testing.assert_close(found[key], parameter.detach(), **TOLERANCE, msg=key)


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.parametrize("parallel_output", [False, True])
@pytest.mark.parametrize(("length", "padding"), [(8, None), (7, "left"), (9, "right")])
def test_llama_trains_as_one_process_does(mode, parallel_output, length, padding):
    options = {"sp_size": 2, "sequence_parallelism_mode": mode, "parallel_output": parallel_output}
    run_on_ranks(compare, 2, "transformers/llama", options, length, padding)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (4, {"sp_size": 2}),
        (4, {"sp_size": 2, "zero_stage": 1}),
        (4, {"sp_size": 2, "zero_stage": 2, "parallel_output": True}),
        (4, {"sp_size": 2, "tp_size": 2}),
        (4, {"sp_size": 2, "tp_size": 2, "parallel_output": True}),
    ],
    ids=["sp2dp2", "sp2dp2zero1", "sp2dp2zero2", "sp2tp2", "sp2tp2split"],
)
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_sequence_times_other_axes_train_as_one_process_does(num_ranks, options, mode):
    options = {**options, "sequence_parallelism_mode": mode}
    run_on_ranks(compare, num_ranks, "transformers/llama", options, 9, "right")
