"""What a script assigns to gradients is averaged; what it writes to parameters is the same on all ranks or raises."""

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, noise
from driven_runs import Run, assert_same_loop
from matrix import matrix, named
from ranked import on_ranks
from torch import nn

from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin

SETTINGS = {
    "plain": Setting(TorchDDPPlugin),
    "views of buckets": Setting(TorchDDPPlugin, {"gradient_as_bucket_view": True}),
    "search": Setting(TorchDDPPlugin, {"find_unused_parameters": True}),
    "static graph": Setting(TorchDDPPlugin, {"static_graph": True}),
}


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


CASE = Case(build=net, batch=noise(4, 8))


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


# ---- values of parameters


def resets(model):
    """Reset the last layer, as agents that learn from rewards do every so many steps."""
    model[2].reset_parameters()


def loads_on_one_rank(model):
    if dist.get_rank() == 0:
        model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})


@on_ranks(2)
@pytest.mark.parametrize(("write", "name"), [(resets, "2.weight"), (loads_on_one_rank, "0.weight")])
def test_values_that_differ_between_ranks_raise_in_the_next_step(write, name):
    run = Run(CASE, Setting(TorchDDPPlugin))

    def step():
        run.backward(run.loss(0))
        run.optimizer.step()
        run.optimizer.zero_grad()

    step()
    torch.manual_seed(dist.get_rank())
    write(run.model)
    step()  # which tells the others, and waits for nobody
    with pytest.raises(ConfigError, match=f"what was written to '{name}'.*seeded alike"):
        step()


def writes_alike(run):
    """Reset a layer, by a generator that all ranks have alike, freeze it, load, and go on."""
    generator = torch.Generator().manual_seed(5)
    for step in range(5):
        if step == 2:
            nn.init.normal_(run.net[2].weight, generator=generator)
        if step == 3:
            run.net[2].requires_grad_(False)
            run.net.load_state_dict({name: 0.5 * value for name, value in run.net.state_dict().items()})
        run.backward(run.loss(step))
        run.step()


def test_equal_values_are_those_of_one_process():
    assert_same_loop(writes_alike, CASE, Setting(TorchDDPPlugin))
