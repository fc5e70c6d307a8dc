"""Launches on two hosts: ranks meet, meet again after a failure, and learn of a host that dies or vanishes."""

import textwrap
import time

import pytest
from two_hosts import two_hosts

LIMIT_SECONDS = 30.0
"""What Booster promises, from a host's death to the end of the processes on the other."""
TORCHRUN_SECONDS = 30.0
"""How long torchrun itself may take to end after its processes have."""


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as connected:
        yield connected


@pytest.mark.slow
def test_ranks_know_that_they_share_no_host(hosts, tmp_path):
    script = tmp_path / "facts.py"
    script.write_text(
        textwrap.dedent("""
        import json, socket
        from booster_core import launch_from_torch
        from booster_core.ranks.store import this_host
        c = launch_from_torch(verbose=False)
        seen = c.all_gather_object(this_host())
        print(json.dumps({
            "rank": c.rank, "local_rank": c.local_rank, "name": socket.gethostname(), "hosts": len(set(seen))
        }), flush=True)
        """)
    )
    hosts.torchrun(script)
    assert [hosts.wait(number, 120) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    for number in range(2):
        assert f'"rank": {number}, "local_rank": 0' in hosts.output(number)
        assert '"hosts": 2' in hosts.output(number)
        assert "Warning" not in hosts.output(number)


TRAINING = """
import sys, time
import torch, torch.distributed as dist
from booster_core import launch_from_torch
c = launch_from_torch(verbose=False, timeout_seconds=float(sys.argv[1]))
last = int(sys.argv[2])
for step in range(10**6):
    if step <= last:
        dist.all_reduce(torch.ones(1))
        if step % 5 == 0:
            c.block_all(name="step")
    if step == int(sys.argv[3]):
        break
    print("step", step, flush=True)
    time.sleep(0.1)
"""


def _start_training(hosts, tmp_path, *, timeout_seconds, collectives_until=10**6, end=-1):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINING))
    hosts.torchrun(script, timeout_seconds, collectives_until, end)
    deadline = time.monotonic() + 90
    while any("step 7" not in hosts.output(number) for number in range(2)):
        assert time.monotonic() < deadline, hosts.output(0) + hosts.output(1)
        time.sleep(0.1)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_when_the_processes_of_a_host_die_the_other_ends(hosts, tmp_path, victim):
    _start_training(hosts, tmp_path, timeout_seconds=600)
    hosts.kill(victim)
    other = 1 - victim
    assert hosts.wait(other, LIMIT_SECONDS + TORCHRUN_SECONDS) != 0, hosts.output(other)
    assert f"Booster: rank {victim}" in hosts.output(other)
    assert "died without a traceback" in hosts.output(other)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_vanishes_is_given_up_at_the_time_limit(hosts, tmp_path, victim):
    # No collectives any more, which would time out, too.
    _start_training(hosts, tmp_path, timeout_seconds=15, collectives_until=5)
    start = time.monotonic()
    hosts.unplug(victim)
    other = 1 - victim
    assert hosts.wait(other, 15 + LIMIT_SECONDS + TORCHRUN_SECONDS) != 0, hosts.output(other)
    assert time.monotonic() - start > 14
    assert f"Booster: rank {victim}" in hosts.output(other)
    assert "could not be reached for 15 s: its machine or the network is down" in hosts.output(other)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_training_outlasts_a_network_that_fails_for_a_while(hosts, tmp_path, side):
    _start_training(hosts, tmp_path, timeout_seconds=600, end=60)
    hosts.unplug(side)
    time.sleep(25)
    before = [hosts.output(number).count("step") for number in range(2)]
    assert [process.poll() for process in hosts.processes] == [None, None], hosts.output(0) + hosts.output(1)
    hosts.plug(side)
    assert [hosts.wait(number, 120) for number in range(2)] == [0, 0], hosts.output(0) + hosts.output(1)
    for number in range(2):
        assert hosts.output(number).count("step") > before[number]
        assert "Booster" not in hosts.output(number)
