"""Launches of several processes that don't go as the first one should: again, at other times, with other settings."""

import re
import sys
import textwrap

import pytest
from free_ports import free_port

PRELUDE = """
import gc, os, sys, time
import torch, torch.distributed as dist
from booster_core.errors import LaunchError
from booster_core.ranks.launch import launch, shutdown

rank, port = int(sys.argv[1]), int(sys.argv[2])

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, or the processes' lines mix
"""


@pytest.fixture
def run(scripts, tmp_path):
    """Return a function that runs a script on ranks 0, 1 and so on, one for each environment; returns what they say."""

    def run_ranks(body, environments, expected_codes=None):
        script = tmp_path / "train.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        port = free_port()
        done = scripts.run(script, [(rank, port) for rank in range(len(environments))], environments)
        assert done.codes == (expected_codes or [0] * len(environments)), done.output
        return done.output

    return run_ranks


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_launching_again_at_the_same_port(run, slow):
    body = f"""
    for number in range(3):
        c = launch(rank, 2, "localhost", port, timeout_seconds=30, verbose=False)
        total = torch.tensor([c.rank + number])
        dist.all_reduce(total)
        tell("launch", number, "rank", rank, "sum", total.item())
        if rank == {slow}:
            time.sleep(1)  # the other one launches again meanwhile
        del c  # which would keep the store that rank 0 serves
        hook = sys.excepthook
        shutdown()
        assert sys.excepthook is not hook
        gc.collect()
        if rank == {slow}:
            time.sleep(0.5)  # where it served the store, that is gone
    """
    output = run(body, [{}, {}])
    for number in range(3):
        for rank in range(2):
            assert f"launch {number} rank {rank} sum {2 * number + 1}\n" in output


def test_processes_that_have_launched_differently_often(run):
    body = """
    if rank == 0:  # of an older run, after which the process of rank 1 was replaced
        launch(0, 1, "localhost", port, verbose=False)
        shutdown()
    c = launch(rank, 2, "localhost", port, timeout_seconds=10, verbose=False)
    tell("rank", rank, "met", c.all_gather_object(rank))
    """
    assert run(body, [{}, {}]).count("met [0, 1]") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")
def test_ranks_on_cpus_run_in_turns_unless_a_policy_is_set(run):
    body = """
    os.sched_setscheduler(0, os.SCHED_IDLE if rank else os.SCHED_OTHER, os.sched_param(0))
    launch(rank, 2, "localhost", port, timeout_seconds=30, verbose=False)
    names = {os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle"}
    threads = [os.sched_getscheduler(int(each)) for each in os.listdir("/proc/self/task")]
    tell("rank", rank, names.get(os.sched_getscheduler(0)), threads.count(os.sched_getscheduler(0)) > 1)
    """
    output = run(body, [{}, {}])
    assert "rank 0 batch True\n" in output  # and threads that it has started since
    assert "rank 1 idle True\n" in output


def test_launching_again_after_a_launch_that_the_others_did_not_come_to(run):
    body = """
    if rank == 0:
        time.sleep(2)
    else:
        try:
            launch(1, 2, "localhost", port, timeout_seconds=0.5)
        except LaunchError as error:
            tell("first", error)
    c = launch(rank, 2, "localhost", port, timeout_seconds=30, verbose=False)
    tell("rank", rank, "met", c.all_gather_object(rank))
    """
    output = run(body, [{}, {}])
    assert "first Rank 1 could not reach rank 0" in output
    assert output.count("met [0, 1]") == 2


WRONG = """
try:
    launch(rank, int(os.environ["SIZE"]), "127.0.0.1", port, timeout_seconds=60)
except LaunchError as error:
    tell("rank", rank, "SAYS", error)
    time.sleep(1.5)  # rank 0 serves the store
"""


@pytest.mark.parametrize("sizes", [(3, 2, 3), pytest.param((3, 3, 4), marks=pytest.mark.slow)])
def test_ranks_that_were_started_for_different_world_sizes(run, sizes):
    output = run(WRONG, [{"SIZE": str(size)} for size in sizes])
    said = dict(re.findall(r"rank (\d) SAYS (.*)", output))
    [(other, size)] = [(rank, size) for rank, size in enumerate(sizes) if size != 3]
    assert sorted(said) == ["0", "1", "2"], output
    for text in said.values():
        assert f"did not start: rank {other} has world_size={size}, but rank 0 has world_size=3. Check" in text


def test_the_monitor_turned_off_on_some_ranks(run):
    output = run(WRONG, [{"SIZE": "2", "BOOSTER_MONITOR": "0"}, {"SIZE": "2"}])
    said = re.findall(r"SAYS (.*)", output)
    assert len(said) == 2
    for text in said:
        assert "did not start: rank 1 has BOOSTER_MONITOR=1, but rank 0 has BOOSTER_MONITOR=0. Check" in text


def test_ranks_without_local_ranks_are_counted_on_their_host(run):
    body = """
    c = launch(rank, 3, "127.0.0.1", port, timeout_seconds=60, verbose=False)
    tell("rank", rank, "is local rank", c.local_rank)
    """
    output = run(body, [{}] * 3)
    for rank in range(3):
        assert f"rank {rank} is local rank {rank}\n" in output
