"""A rank that leaves `boost` in the middle: the others say that they wait in `boost`, whichever part it was."""

import pytest
import torch
from reference_plugins import ReferencePlugin
from torch import nn
from torch.utils.data import DataLoader, Sampler

from booster_core import Booster
from booster_core.errors import MissingRanksError
from booster_core.ranks import DistCoordinator
from booster_runtime import LazyInitContext
from booster_testing import run_on_ranks


class Left(BaseException):
    """What no check catches, as a KeyboardInterrupt."""


class Model(nn.Linear):
    leaves = False

    def named_modules(self, *args, **kwargs):
        if self.leaves:
            raise Left
        return super().named_modules(*args, **kwargs)


class Order(Sampler):
    """Leaves, or lets a model leave when it is looked at next."""

    def __init__(self, model=None):
        self.model = model

    def __len__(self):
        return 4

    def __iter__(self):
        if self.model is None:
            raise Left
        self.model.leaves = True
        return iter(range(4))


def boost_and_leave(part):
    coordinator = DistCoordinator()
    with LazyInitContext() if part == "lazy" else torch.random.fork_rng(devices=[]):
        model = Model(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = None
    if coordinator.rank == 1:
        model.leaves = part == "checks"
        sampler = {"checks": None, "loader": Order(), "lazy": Order(model)}[part]
    loader = DataLoader(range(4), sampler=sampler or Order(nn.Linear(2, 2)))
    with pytest.raises(MissingRanksError if coordinator.rank == 0 else Left) as raised:
        Booster("cpu", plugin=ReferencePlugin()).boost(model, optimizer, dataloader=loader)
    return str(raised.value)


@pytest.mark.parametrize("part", ["checks", "loader", "lazy"])
def test_who_waits_is_told_that_it_is_in_boost(part):
    told = run_on_ranks(boost_and_leave, 2, part, group_timeout_seconds=2)[0]
    assert told.startswith("`boost` waited 2 s for rank 1 of 2")
