from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, MissingRanksError
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


def _goes_on(failing, error):
    for number in range(2):
        try:
            with NamedCall("forward"):
                if number == 0 and dist.get_rank() in failing:
                    raise error
                if number == 0 and not failing:
                    dist.all_reduce(torch.ones(1))
        except type(error):
            pass
        except MissingRanksError as missing:
            return str(missing)
    total = torch.ones(1)
    _step()
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("failing", [(), (0, 1)])
def test_ranks_go_on_after_an_error_that_all_of_them_raise(failing):
    assert run_on_ranks(_goes_on, 2, failing, ValueError("bad"), group_timeout_seconds=5.0) == [2, 2]


def test_an_error_of_booster_may_be_raised_before_anything_is_sent():
    assert run_on_ranks(_goes_on, 2, (1,), ConfigError("bad"), group_timeout_seconds=5.0) == [2, 2]


def _goes_on_alone():
    try:
        return _goes_on((1,), ValueError("bad"))
    except MissingRanksError:
        return "waited"


def test_a_rank_that_goes_on_after_an_error_alone_raises():
    other, message = run_on_ranks(_goes_on_alone, 2, group_timeout_seconds=1.5)
    assert other == "waited"
    assert message.startswith(
        "`forward` #1 has raised on this rank, but not on all of ranks 0 and 1, which wait for what it left out: "
        "ValueError: bad. Let the exception"
    )
