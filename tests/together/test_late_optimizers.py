"""An optimizer that is made after `boost`, from the boosted model's parameters, as users of Fabric write it, under DDP.

Strategies that shard refuse it: `test_gradients_without_optimizer.py`.
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from cases import Case, Setting
from driven_runs import Run, assert_same_loop
from matrix import matrix
from torch import nn

from booster_core.errors import GradientError
from booster_ddp import TorchDDPPlugin
from booster_testing import expect_on_ranks

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "ddp, no search": (TorchDDPPlugin, {"find_unused_parameters": False}),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5),
}


class Net(nn.Module):
    """Layers, a scalar, a layer that is used in some steps only, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, *, more=False):
        hidden = self.body(x) * self.scale
        return self.sometimes(hidden) if more else hidden


def net(trains_all):
    model = Net()
    model.never.requires_grad_(trains_all)
    return model


def rows(number, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def optimizer_named(kind, model):
    return OPTIMIZERS[kind](model.parameters())


def accumulate(run, searches):
    """Three steps of two micro-batches each, the last of one alone, with a forward without backward before a step."""
    for step in range(3):
        for micro in range(1 if step == 2 else 2):
            with run.no_sync() if micro == 0 else contextlib.nullcontext():
                run.loss(10 * step + micro, more=step < 2 or not searches).backward()
        with torch.no_grad():
            run.model(rows(99, 0))
        run.step()


@matrix(["ddp-sgd"], name=PLUGINS, kind=OPTIMIZERS)
def test_training_equals_that_of_one_process(name, kind):
    searches = name == "ddp"
    case = Case(build=partial(net, searches), batch=rows, optimizer=partial(optimizer_named, kind))
    assert_same_loop(partial(accumulate, searches=searches), case, Setting(*PLUGINS[name]), late=True)


def graph_twice():
    run = Run(Case(build=partial(net, True), batch=rows), Setting(*PLUGINS["ddp"]), late=True)
    out = run.model(rows(0, dist.get_rank()), more=True)
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def test_what_ddp_does_not_average_raises_where_no_step_could():
    expect_on_ranks(GradientError, "Pass the optimizer to `boost`", graph_twice, 2)
