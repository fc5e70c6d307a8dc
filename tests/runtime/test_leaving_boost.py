"""A rank that leaves `boost` in the middle: the others say that they wait in `boost`, which meets once.

`together/test_boost_meetings.py` counts its meetings.
"""

import pytest
from ranked import on_ranks
from reference_plugins import ReferencePlugin
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from booster_core import Booster
from booster_core.errors import MissingRanksError
from booster_core.ranks import DistCoordinator


class Left(BaseException):
    """What no check catches, as a KeyboardInterrupt."""


class Leaves(SequentialSampler):
    def __iter__(self):
        if DistCoordinator().rank == 1:
            raise Left
        return super().__iter__()


@on_ranks(2, group_timeout_seconds=2)
def test_who_waits_is_told_that_it_is_in_boost():
    loader = DataLoader(range(4), sampler=Leaves(range(4)))
    waits = DistCoordinator().rank == 0
    with pytest.raises(
        MissingRanksError if waits else Left, match=r"^`boost` waited 2 s for rank 1 of 2" if waits else None
    ):
        Booster("cpu", plugin=ReferencePlugin()).boost(nn.Linear(2, 2), dataloader=loader)
