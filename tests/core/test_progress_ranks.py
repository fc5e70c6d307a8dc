from __future__ import annotations

import time

import torch
import torch.distributed as dist

from booster_core.errors import MissingRanksError
from booster_core.ranks.calls import NamedCall
from booster_testing import run_on_ranks


def _step():
    with NamedCall("step"):
        dist.all_reduce(torch.ones(1))


def _one_does_not_step():
    for index in range(3):
        with NamedCall("backward"):
            dist.all_reduce(torch.ones(1))
        if index == 2 and dist.get_rank() == 1:
            time.sleep(4)
            return None
        try:
            _step()
        except MissingRanksError as error:
            return str(error), type(error.__cause__).__name__
    return None


def test_a_collective_that_times_out_names_who_did_not_come():
    (message, cause), _ = run_on_ranks(_one_does_not_step, 2, group_timeout_seconds=1.5)
    assert message.startswith("`step` #3 timed out after ")
    assert message.endswith(
        " s: rank 1 has not reached it; it last finished `backward` #3. Every rank must make the same calls in the "
        "same order."
    )
    assert cause == "RuntimeError"
