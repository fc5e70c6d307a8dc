"""Gradients that a script computes by itself and assigns to ``parameter.grad`` are averaged, as others are."""

import torch
from cases import Case, Setting
from driven_runs import assert_same_loop
from matrix import matrix, named
from torch import nn

from booster_ddp import TorchDDPPlugin

SETTINGS = {
    "plain": Setting(TorchDDPPlugin),
    "views of buckets": Setting(TorchDDPPlugin, {"gradient_as_bucket_view": True}),
    "search": Setting(TorchDDPPlugin, {"find_unused_parameters": True}),
    "static graph": Setting(TorchDDPPlugin, {"static_graph": True}),
}


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica))


CASE = Case(build=net, batch=rows, max_norm=None)


def computes_them(run):
    """Gradient surgery: each task's gradient by `torch.autograd.grad`, and a sum of them in place of backward."""
    parameters = list(run.net.parameters())
    for step in range(3):
        tasks = [torch.autograd.grad(run.loss(10 * step + task), parameters) for task in range(2)]
        for parameter, first, second in zip(parameters, *tasks, strict=True):
            parameter.grad = first + 0.5 * second
        run.step()


def replaces_one(run):
    """One gradient of a backward is replaced by one of this rank's own samples."""
    weight = run.net[2].weight
    for step in range(3):
        (own,) = torch.autograd.grad(run.loss(10 + step), [weight])
        run.backward(run.loss(step))
        weight.grad = own
        run.step()


def takes_turns(run):
    """Steps of backward and of gradients by hand, whose memory may be where others' was."""
    parameters = list(run.net.parameters())
    for step in range(4):
        if step % 2:
            for parameter, own in zip(parameters, torch.autograd.grad(run.loss(step), parameters), strict=True):
                parameter.grad = own
        else:
            run.backward(run.loss(step))
        run.step()


LOOPS = [computes_them, replaces_one, takes_turns]


@matrix(1, setting=SETTINGS, loop=named(LOOPS, [loop.__name__ for loop in LOOPS]))
def test_they_are_averaged(setting, loop):
    assert_same_loop(loop, CASE, SETTINGS[setting])
