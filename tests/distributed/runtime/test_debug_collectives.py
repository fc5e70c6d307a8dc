"""``BOOSTER_DEBUG=collectives``: a planted mismatch raises on every rank, with each call's place."""

import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, MissingRanksError
from booster_runtime import collectives
from booster_runtime.collectives import MismatchError
from booster_runtime.collectives.transport import transport_of
from booster_testing import expect_on_ranks, run_on_ranks

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def debugging(monkeypatch):
    monkeypatch.setenv("BOOSTER_DEBUG", "collectives")


def line_of(function, text):
    """Return ``file:line`` of the line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    return f"{HERE}:{first + next(index for index, line in enumerate(lines) if text in line)}"


def other_operation():
    if dist.get_rank() == 1:
        collectives.all_gather(torch.ones(4), (0, 2, 4)).wait()
    else:
        collectives.all_reduce(torch.ones(4)).wait()


def other_dtype():
    if dist.get_rank() == 1:
        collectives.all_reduce(torch.ones(4, dtype=torch.int32)).wait()
    else:
        collectives.all_reduce(torch.ones(4, dtype=torch.float32)).wait()


def other_length():
    if dist.get_rank() == 1:
        collectives.all_reduce(torch.ones(8)).wait()
    else:
        collectives.all_reduce(torch.ones(4)).wait()


def other_reduction():
    if dist.get_rank() == 1:
        collectives.all_reduce(torch.ones(4), dist.ReduceOp.MAX).wait()
    else:
        collectives.all_reduce(torch.ones(4), dist.ReduceOp.SUM).wait()


def one_skips_a_call():
    """Both calls look alike, so that without the sites rank 1's second would be taken for its first."""
    if dist.get_rank() == 0:
        collectives.all_reduce(torch.ones(4)).wait()  # the first
    collectives.all_reduce(torch.ones(4)).wait()  # the second


@pytest.mark.parametrize(
    ("function", "line_0", "line_1", "call_0", "call_1"),
    [
        (other_operation, "all_reduce", "all_gather", "all_reduce (SUM) of [4]", "all_gather of [2, 2]"),
        (other_dtype, "float32", "int32", "of [4] of torch.float32", "of [4] of torch.int32"),
        (other_length, "ones(4)", "ones(8)", "of [4]", "of [8]"),
        (other_reduction, "SUM", "MAX", "(SUM)", "(MAX)"),
        (one_skips_a_call, "the first", "the second", "all_reduce (SUM)", "all_reduce (SUM)"),
    ],
)
def test_a_mismatch_raises_on_every_rank_with_both_sites(function, line_0, line_1, call_0, call_1):
    errors = expect_on_ranks(MismatchError, "call different collectives", function, 2, group_timeout_seconds=20)
    zero, one = (re.escape(call) for call in (call_0, call_1))
    expected = (
        f"group of ranks \\[0, 1\\]: rank 0 calls .*{zero}.*{line_of(function, line_0)}.*; "
        f"rank 1 calls .*{one}.*{line_of(function, line_1)}"
    )
    for error in errors:
        assert re.search(expected, str(error)), error


def sends_more_than_expected():
    rank = dist.get_rank()
    sent = (0, 2, 4) if rank == 0 else (0, 3, 5)
    collectives.all_to_all(torch.ones(sent[-1]), sent, torch.ones(4), (0, 2, 4)).wait()


def test_an_exchange_of_other_lengths_names_both_ranks():
    expect_on_ranks(
        MismatchError, "Rank 1 sends 3 elements to rank 0, which expects 2", sends_more_than_expected, 2,
        group_timeout_seconds=20,
    )  # fmt: skip


def one_is_missing_at_the_end():
    for _ in range(2 - dist.get_rank()):
        collectives.all_reduce(torch.ones(4)).wait()
    if dist.get_rank() == 1:
        import time

        time.sleep(5)
        msg = "rank 1 stayed away for longer than the time limit"
        raise MissingRanksError(msg)


def test_a_missing_rank_is_named_with_its_last_collective_at_the_time_limit():
    errors = expect_on_ranks(
        MissingRanksError, "rank", one_is_missing_at_the_end, 2, group_timeout_seconds=2, timeout_seconds=40
    )
    assert "for rank 1, whose last collective was all_reduce (SUM) of [4] of torch.float32 at" in str(errors[0])
    assert line_of(one_is_missing_at_the_end, "all_reduce") in str(errors[0])


def calls_everything():
    """Call every function, the same on every rank, and return the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = [2 * each for each in range(size + 1)]
    out, gathered, swapped = torch.zeros(2), torch.full((2 * size,), float(rank)), torch.zeros(2 * size)
    summed, told = torch.full((5,), float(rank)), torch.full((3,), float(rank))
    group = dist.new_group(list(range(1, size)))
    for _ in range(3):
        collectives.reduce_scatter(torch.ones(2 * size), bounds, out).wait()
        collectives.reduce_scatter([(0, torch.ones(2 * size))], bounds, out).wait()
        collectives.all_gather(gathered, bounds).wait()
        collectives.all_to_all(torch.full((2 * size,), float(rank)), bounds, swapped, bounds).wait()
        collectives.broadcast(told).wait()
        if rank > 0:
            collectives.all_reduce(torch.ones(2), group=group).wait()
    collectives.all_reduce(summed).wait()
    return [out, gathered, swapped, told, summed, collectives.all_gather_object(rank)]


def test_calls_that_agree_give_the_results_of_calls_that_are_not_compared(monkeypatch):
    compared = run_on_ranks(calls_everything, 3)
    monkeypatch.delenv("BOOSTER_DEBUG")
    for with_check, without in zip(compared, run_on_ranks(calls_everything, 3), strict=True):
        for found, expected in zip(with_check, without, strict=True):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def compares():
    return transport_of(None).agreement is not None


def test_without_the_variable_nothing_is_compared(monkeypatch):
    assert run_on_ranks(compares, 2) == [True] * 2
    monkeypatch.delenv("BOOSTER_DEBUG")
    assert run_on_ranks(compares, 2) == [False] * 2


def sets_its_own(*values):
    """Set BOOSTER_DEBUG to another value on each rank, and use a group."""
    value = values[dist.get_rank()]
    if value is None:
        os.environ.pop("BOOSTER_DEBUG", None)
    else:
        os.environ["BOOSTER_DEBUG"] = value
    collectives.all_reduce(torch.ones(1)).wait()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("collectives", None), r"BOOSTER_DEBUG=collectives is set on ranks \[0\] only"),
        (("all", None), "Rank 0: BOOSTER_DEBUG='all' lists 'all'; the only mode is 'collectives'"),
    ],
)
def test_contradicting_settings_raise_on_every_rank(values, message):
    expect_on_ranks(ConfigError, message, sets_its_own, 2, *values)
