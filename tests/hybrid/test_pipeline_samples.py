"""Batches from plain iterators: a tensor is cut into microbatches only where it is seen to be for each sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import evaluate_batch, full_gradient, train_batch
from booster_testing import expect_on_ranks, run_on_ranks

CLASSES = 4


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def of_classes(outputs, batch):
    """Weigh samples by their classes: the weights are as long as the batch, and not for its samples."""
    losses = functional.cross_entropy(outputs, batch["labels"], reduction="none")
    return (losses * batch["weights"][batch["labels"] % len(batch["weights"])]).mean()


def of_targets(outputs, batch):
    return ((outputs - batch["targets"][:, None]).square().mean(-1) * batch["weights"]).mean()


def some_batch(count):
    x = torch.randn(count, CLASSES, generator=torch.Generator().manual_seed(count))
    return {
        "x": x,
        "labels": torch.arange(count) % CLASSES,
        "targets": x.sum(-1),
        "weights": torch.linspace(1, 2, count),
    }


def endless():
    while True:
        yield some_batch(4)


def make():
    torch.manual_seed(3)
    return Stack()


def run(call, criterion, example):
    plugin = HybridParallelPlugin(pp_size=2, custom_policy=ShardingPolicy(layers=("layers",)), example_batch=example)
    booster = Booster("cpu", plugin=plugin)
    model = make()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if call == "train_batch":
        train_batch(booster, endless(), model, criterion, optimizer)
    elif call == "evaluate_batch":
        evaluate_batch(booster, endless(), model, criterion)
    else:
        booster.execute_pipeline(endless(), model, criterion, optimizer)
    return {name: full_gradient(booster, model, name) for name, _ in make().named_parameters()}


@pytest.mark.parametrize("call", ["execute_pipeline", "train_batch", "evaluate_batch"])
def test_vectors_of_an_iterator_that_may_be_for_all_samples_are_refused(call):
    message = r"\['targets'\] of shape \(4,\) may have an entry for each sample.*Pass the data loader to `boost`"
    expect_on_ranks(ConfigError, message, run, 2, call, of_classes, torch.ones(2, CLASSES))


def test_class_weights_that_the_example_shows_are_refused():
    example = {**some_batch(2), "weights": torch.ones(4)}
    message = r"\['weights'\] has 4 entries in batches in which \['x'\] has 2 and 4"
    expect_on_ranks(ConfigError, message, run, 2, "execute_pipeline", of_classes, example)


def test_vectors_that_the_example_shows_to_be_for_samples_train_as_one_process():
    whole, batch = make(), some_batch(4)
    of_targets(whole(batch["x"]), batch).backward()
    for found in run_on_ranks(run, 2, "execute_pipeline", of_targets, some_batch(2)):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)
