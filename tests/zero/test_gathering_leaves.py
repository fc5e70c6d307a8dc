"""Modules gathered as one: ranks may use other parts of them, and gradients equal those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, itself
from gathering_plugin import GatheringPlugin
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_zero.engine import Bucket

WIDTH, EXPERTS = 8, 4


@dataclass
class Mixed:
    hidden: torch.Tensor
    number: int


class Bank(nn.Module):
    """Runs one of its experts."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x, number):
        return Mixed(torch.tanh(self.experts[number](x)), number)


class Net(nn.Module):
    """Uses a bank of experts on its input, which needs no gradient, and another one twice."""

    def __init__(self):
        super().__init__()
        self.first = Bank()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.second = Bank()
        self.head = nn.Linear(WIDTH, 1)
        self.between = []
        """Called with the gradient between the banks, when backward has passed the second one."""

    def forward(self, x, numbers):
        first, *others = numbers
        x = self.first(x, first).hidden
        for look in self.between if x.requires_grad else ():
            x.register_hook(look)
        x = self.dense(x)
        for number in others:
            x = self.second(x, number).hidden
        return self.head(x).square().mean()


def batch_of(step, rank):
    """Return samples, and other experts for each rank; in the first step all ranks use all of the second bank."""
    others = range(EXPERTS) if step == 0 else (step % EXPERTS, (step + 2 * rank) % EXPERTS)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, [(step + rank) % EXPERTS, *others]


CASE = Case(build=Net, batch=batch_of, loss=itself, steps=4, max_norm=None)


@on_ranks(2)
def test_gradients_and_parameters_equal_one_process():
    def pins_after_backward(booster, model, optimizer):
        model(*batch_of(1, dist.get_rank()))  # a graph that nobody runs backward
        with torch.no_grad():
            model(*batch_of(2, dist.get_rank()))
        booster.backward(model(*batch_of(3, dist.get_rank())), optimizer)
        return sum(chunk.pins for chunk in model.gatherer.layout.buckets)

    setting = Setting(GatheringPlugin, {"leaf_class": Bank})
    assert assert_equals_one_process(CASE, setting, tell=pins_after_backward) == [0, 0]


@on_ranks(2)
def test_backward_awaits_no_gradients_of_experts_that_it_has_passed():
    net, optimizer = CASE.make()
    booster = Booster(plugin=GatheringPlugin(leaf_class=Bank))
    model, optimizer, *_ = booster.boost(net, optimizer)
    started, counted = [], []
    net.between.append(lambda _: counted.append(len(started)))

    def start(chunk, *args):
        started.append(chunk)
        return Bucket.start_reduction(chunk, *args)

    for numbers in ([0, *range(EXPERTS)], [0, dist.get_rank()]):
        for chunk in model.gatherer.layout.buckets:
            chunk.start_reduction = partial(start, chunk)
        booster.backward(model(batch_of(0, 0)[0], numbers), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        started.clear()
    of_all, of_one = counted
    assert of_one == of_all, "as many as in the first step, in which all experts have gradients"
    assert of_all > 1
