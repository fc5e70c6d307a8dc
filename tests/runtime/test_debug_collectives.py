"""``BOOSTER_DEBUG=collectives``: the monitor finds a planted mismatch, also one that nobody waits in, by its places."""

import contextlib
import inspect
import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port

from booster_core.errors import ConfigError
from booster_core.ranks import current_world
from booster_runtime import collectives
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


def sends_more_than_expected():
    rank = dist.get_rank()
    sent = (0, 2, 4) if rank == 0 else (0, 3, 5)
    collectives.all_to_all(torch.ones(sent[-1]), sent, torch.ones(4), (0, 2, 4)).wait()


def other_length():
    if dist.get_rank() == 1:
        collectives.all_reduce(torch.ones(8)).wait()
    else:
        collectives.all_reduce(torch.ones(4)).wait()


def move_nothing(*_, **__):
    return collectives.Pending()


def said_by_the_monitor(function):
    """Call a function whose collectives move nothing, since some would hang; return what the monitor says on rank 0."""
    names = ("all_gather", "all_reduce", "all_to_all")
    with mock.patch.multiple(collectives.Transport, **dict.fromkeys(names, move_nothing)):
        function()
    server = current_world().monitor._server
    deadline = time.monotonic() + 20
    while server is not None and server._verdicts.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return None if server is None or server._verdicts.failure is None else server._verdicts.failure.text


FAULTS = {
    "operation": (other_operation, "all_reduce", "all_gather", "all_reduce (SUM) of [4]", "all_gather of [2, 2]"),
    "dtype": (other_dtype, "float32", "int32", "of [4] of torch.float32", "of [4] of torch.int32"),
    "length": (other_length, "ones(4)", "ones(8)", "of [4]", "of [8]"),
    "reduction": (other_reduction, "SUM", "MAX", "(SUM)", "(MAX)"),
    "skipped call": (one_skips_a_call, "the first", "the second", "all_reduce (SUM)", "all_reduce (SUM)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mismatch_is_told_with_both_sites(fault):
    function, line_0, line_1, call_0, call_1 = FAULTS[fault]
    text, _ = run_on_ranks(said_by_the_monitor, 2, function)
    zero, one = (re.escape(call) for call in (call_0, call_1))
    expected = (
        "the ranks call different collectives as number 1 of the group of ranks 0 and 1: "
        f"rank 0 calls .*{zero}.*{line_of(function, line_0)}.*; rank 1 calls .*{one}.*{line_of(function, line_1)}"
    )
    assert re.search(expected, text), text


def test_an_exchange_of_other_lengths_names_both_ranks():
    text, _ = run_on_ranks(said_by_the_monitor, 2, sends_more_than_expected)
    assert "rank 1 sends 3 elements to rank 0, which expects 2" in text
    assert text.count(line_of(sends_more_than_expected, "collectives.all_to_all")) == 2


LENGTHS = """
import sys
import time
import torch
from booster_core.ranks.launch import launch
from booster_runtime import collectives
from booster_runtime.watch import member

member.GRACE_SECONDS = 0.5
rank = int(sys.argv[1])
launch(rank, 2, "127.0.0.1", int(sys.argv[2]), verbose=False, timeout_seconds=60)
collectives.all_reduce(torch.ones(4)).wait()
if rank == 0:
    time.sleep(1)  # what the other has told is there before it dies
    collectives.all_reduce(torch.ones(8)).wait()  # line 15
else:
    collectives.all_reduce(torch.ones(4)).wait()  # line 17: gloo aborts this process
collectives.all_reduce(torch.ones(4)).wait()
"""


def test_other_lengths_are_told_although_gloo_aborts_the_process(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LENGTHS)
    port = str(free_port())
    run = scripts.run(path, [(0, port), (1, port)])
    assert all(run.codes), run.output
    assert re.search(r"all_reduce \(SUM\) of \[8\] of torch.float32 at .*train.py:15", run.output), run.output
    assert re.search(r"all_reduce \(SUM\) of \[4\] of torch.float32 at .*train.py:17", run.output), run.output
    assert re.search(r"(?s)Fatal Python error: Aborted.*train.py\", line 17", run.output), run.output


def one_is_missing_at_the_end():
    for _ in range(2 - dist.get_rank()):
        collectives.all_reduce(torch.ones(4)).wait()
    if dist.get_rank() == 1:
        time.sleep(2)


def last_calls(function):
    with contextlib.suppress(RuntimeError):
        function()
    server = current_world().monitor._server
    return None if server is None else server._verdicts.places(())


def test_the_last_collective_of_every_rank_is_told():
    places, _ = run_on_ranks(last_calls, 2, one_is_missing_at_the_end, group_timeout_seconds=1)
    what = f"group of ranks 0 and 1, all_reduce (SUM) of [4] of torch.float32 at {Path(__file__)}"
    zero, one = places.split("; ")
    assert f"rank 0 made no such call yet, its last collective being number 2 of the {what}" in zero
    assert f"rank 1 made no such call yet, its last collective being number 1 of the {what}" in one


def calls_everything():
    """Call every function, the same on every rank, and return the results, and what the monitor says."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = [2 * each for each in range(size + 1)]
    out, gathered, swapped = torch.zeros(2), torch.full((2 * size,), float(rank)), torch.zeros(2 * size)
    summed, told = torch.full((5,), float(rank)), torch.full((3,), float(rank))
    group = dist.new_group(list(range(1, size)))
    for _ in range(3):
        collectives.reduce_scatter(torch.ones(2 * size), bounds, out).wait()
        collectives.reduce_scatter([(0, torch.ones(2 * size))], bounds, out).wait()
        collectives.reduce_scatter([(index, torch.ones(1)) for index in range(2 * size)], bounds, out).wait()
        collectives.all_gather(gathered, bounds).wait()
        collectives.all_to_all(torch.full((2 * size,), float(rank)), bounds, swapped, bounds).wait()
        collectives.broadcast(told).wait()
        if rank > 0:
            collectives.all_reduce(torch.ones(2), group=group).wait()
    collectives.all_reduce(summed).wait()
    results = [out, gathered, swapped, told, summed, collectives.all_gather_object(rank)]
    server = current_world().monitor._server
    return results, None if server is None else (server._verdicts.failure, server._verdicts._noted._calls)


def test_calls_that_agree_have_the_results_of_calls_that_are_not_noted(monkeypatch):
    noted = run_on_ranks(calls_everything, 3)
    monkeypatch.delenv("BOOSTER_DEBUG")
    for (with_notes, _), (without, _) in zip(noted, run_on_ranks(calls_everything, 3), strict=True):
        for found, expected in zip(with_notes, without, strict=True):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    failure, kept = noted[0][1]
    assert failure is None
    # What every rank has told of is forgotten; the monitor may yet have to hear of the last.
    assert {number for _, _, number in kept} <= {20}


def uses_a_group_without_monitor():
    world = current_world()
    world.monitor.close()
    collectives.all_reduce(torch.ones(1)).wait()


def test_a_run_that_nobody_watches_is_refused():
    match = "BOOSTER_DEBUG=collectives tells the monitor of collectives, and no monitor watches this run"
    expect_on_ranks(ConfigError, match, uses_a_group_without_monitor, 2)
