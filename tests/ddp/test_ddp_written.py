"""What a script writes to parameters between steps is the same on all ranks, or the next step raises."""

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting
from driven_runs import assert_same_loop
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def resets(model):
    """Reset the last layer, as agents that learn from rewards do every so many steps."""
    model[2].reset_parameters()


def loads_on_one_rank(model):
    if dist.get_rank() == 0:
        model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})


@on_ranks(2)
@pytest.mark.parametrize(("write", "name"), [(resets, "2.weight"), (loads_on_one_rank, "0.weight")])
def test_values_that_differ_between_ranks_raise_in_the_next_step(write, name):
    torch.manual_seed(0)
    model = net()
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        booster.backward(model(rows(0, dist.get_rank())).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step()
    write(model)
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
    assert_same_loop(writes_alike, Case(build=net, batch=rows, max_norm=None), Setting(TorchDDPPlugin))
