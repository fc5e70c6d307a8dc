"""Vectors with an entry for each sample are cut into microbatches, also those that only the criterion takes."""

from __future__ import annotations

import torch
from torch import nn

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_runtime import full_gradient
from booster_testing import run_on_ranks

CLASSES = 4


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CLASSES, CLASSES) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def of_targets(outputs, batch):
    return ((outputs - batch["targets"][:, None]).square().mean(-1) * batch["weights"]).mean()


def some_batch(count):
    x = torch.randn(count, CLASSES, generator=torch.Generator().manual_seed(count))
    return {
        "x": x,
        "targets": x.sum(-1),
        "weights": torch.linspace(1, 2, count),
    }


def make():
    torch.manual_seed(3)
    return Stack()


def run():
    plugin = HybridParallelPlugin(
        pp_size=2, custom_policy=ShardingPolicy(layers=("layers",)), example_batch=torch.ones(2, CLASSES)
    )
    booster = Booster("cpu", plugin=plugin)
    model = make()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.execute_pipeline(iter([some_batch(4)]), model, of_targets, optimizer)
    return {name: full_gradient(booster, model, name) for name, _ in make().named_parameters()}


def test_vectors_of_the_criterion_train_as_in_one_process():
    whole, batch = make(), some_batch(4)
    of_targets(whole(batch["x"]), batch).backward()
    for found in run_on_ranks(run, 2):
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)
