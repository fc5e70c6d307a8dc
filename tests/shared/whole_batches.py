"""Whole batches by `train_batch` and `evaluate_batch`, against plain PyTorch on one large batch.

Batches have unequal numbers of counted labels on each rank, and in each part that a pipeline cuts them into.
"""

import pytest
import torch
from named_plugins import make_model

from booster_core import Booster
from booster_runtime import evaluate_batch, train_batch
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

STEPS = 2
ACCUMULATION = 2
SAMPLES = 4
MAX_NORM = 0.3
LEARNING_RATE = 0.1


def batches_of(replica):
    """Return the batches of a replica for all steps; a third to all of their labels count."""
    draw = torch.Generator().manual_seed(replica)
    batches = []
    for index in range(STEPS * ACCUMULATION):
        ids = torch.randint(16, (SAMPLES, 6), generator=draw)
        labels = ids.clone()
        for sample in range(SAMPLES):
            labels[sample, 2 + (index + sample + replica) % 5 :] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def count_labels(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def cross_entropy(outputs, batch, reduction="mean"):
    logits = getattr(outputs, "logits", outputs)
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction
    )


def train_plainly(replicas, build):
    """Return losses, the last step's loss of evaluation, and parameters of one process."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        batches = [
            batch for replica in range(replicas) for batch in batches_of(replica)[step * ACCUMULATION :][:ACCUMULATION]
        ]
        total = sum(count_labels(batch) for batch in batches)
        loss = sum(cross_entropy(model(input_ids=each["input_ids"]), each, "sum") for each in batches) / total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    firsts = [batches_of(replica)[0] for replica in range(replicas)]
    with torch.no_grad():
        summed = sum(cross_entropy(model(input_ids=each["input_ids"]), each, "sum") for each in firsts)
    weight = float(sum(count_labels(each) for each in firsts))
    return losses, (float(summed) / weight, weight), {name: p.detach() for name, p in model.named_parameters()}


def train(plugin, build):
    model = build()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    batches = iter(batches_of(index))
    losses = [
        train_batch(
            booster,
            batches,
            model,
            cross_entropy,
            optimizer,
            accumulation=ACCUMULATION,
            max_norm=MAX_NORM,
            weight=count_labels,
        ).item()
        for _ in range(STEPS)
    ]
    with pytest.raises(StopIteration):
        train_batch(booster, batches, model, cross_entropy, optimizer)
    model.train()
    frozen = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert frozen
    for module in frozen:
        module.eval()
    modes = [module.training for module in model.modules()]
    evaluation = evaluate_batch(booster, iter(batches_of(index)), model, cross_entropy, weight=count_labels)
    assert [module.training for module in model.modules()] == modes
    outputs = evaluation.outputs
    logits = None if outputs is None else len(getattr(outputs, "logits", outputs))
    return losses, (evaluation.loss.item(), evaluation.weight), whole_model(booster, model), logits


def assert_equals_one_large_batch(plugin, num_ranks, replicas, build=make_model):
    expected_losses, expected_evaluation, expected = train_plainly(replicas, build)
    results = run_on_ranks(train, num_ranks, plugin, build)
    for losses, evaluation, parameters, _ in results:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
        assert_same_tensors(parameters, expected, tolerance_for(torch.float32))
    assert {rows for *_, rows in results} - {None} == {SAMPLES}
