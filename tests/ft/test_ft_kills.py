"""What follows when a replica group, or a rank of one, dies or stops: the others go on, and it comes back."""

import random
import signal
import time

import pytest
import torch
from matrix import matrix
from replica_groups import replica_groups

from booster_core import Booster
from booster_testing.ranks import run_on_ranks

LIMIT = 15.0
"""Seconds within which the others go on after a failure, at a time limit of 10 s."""
HEARTBEAT = 5.0
"""Seconds for which the lighthouse takes a dead group for one that lives."""


def _check(groups, survivors, *, limit=LIMIT):
    """Check that survivors never restarted, lost at most a step at each failure, and all states are equal."""
    for group in survivors:
        for rank in range(groups.ranks):
            steps = groups.steps(group, rank)
            assert len({line["pid"] for line in steps}) == 1, "no other group restarts"
            assert sum(not line["committed"] for line in steps) <= 1
            assert max(line["seconds"] for line in steps) < limit
    for rank in range(groups.ranks):
        _check_equal([groups.commits(group, rank) for group in range(groups.num_groups)])


def _check_equal(commits):
    assert sum(len(each) for each in commits) > len(set().union(*commits)), "some steps were taken together"
    for step in set().union(*commits):
        states = {each[step]["state"] for each in commits if step in each}
        rates = {each[step]["lr"] for each in commits if step in each}
        assert len(states) == len(rates) == 1, f"groups differ after step {step}"


FAILURES = [(2, 1, None), (3, 1, None), (2, 2, None), (2, 2, [0]), (2, 2, [1])]
"""Numbers of groups and of ranks in each, and which ranks of the second group fail: all of them, or some."""


@matrix(["2-1-None-kill"], **{"num_groups, ranks, victims": FAILURES}, how=["kill", "stop"])
def test_a_group_that_fails_comes_back(num_groups, ranks, victims, how, tmp_path):
    """The others go on meanwhile, and all end some steps later."""
    with replica_groups(tmp_path, num_groups, ranks) as groups:
        groups.start_all()
        groups.wait_for(0, 3, 180)
        groups.kill(1, victims, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "kill":
            groups.wait_group(1)
        before = groups.steps(0)[-1]["step"]
        groups.wait_for(0, before + 3)
        if how == "stop" and victims is None:
            groups.kill(1, victims, signal.SIGCONT)
        else:
            if how == "stop":
                rank = next(each for each in range(ranks) if each not in victims)
                ends = "Booster: this replica group ends, since"
                groups.wait_until(lambda: ends in groups.output(1, rank), 60, "the group notices")
                groups.kill(1)
                groups.wait_group(1)
            groups.start(1)
        began = groups.steps(0)[-1]["step"]
        groups.wait_until(lambda: max(groups.commits(1)) > began, 180, "the group comes back, or goes on")
        groups.end_soon()
        groups.wait_all(120)
        _check(groups, survivors=[group for group in range(num_groups) if group != 1])


@pytest.mark.slow  # half a minute, as the one before
def test_groups_that_come_back_do_not_begin_without_one_that_lives(tmp_path):
    """The only group with the steps of the run is busy for longer than the lighthouse waits for it."""
    with replica_groups(tmp_path, 3, lighthouse=("--join-timeout", "1")) as groups:
        groups.start_all()
        groups.wait_for(0, 3, 180)
        (tmp_path / "hold0").touch()
        for victim in (1, 2):
            groups.kill(victim)
            groups.wait_group(victim)
            groups.start(victim)
        began = max(groups.commits(0))
        waits = "waits for group_0"
        groups.wait_until(lambda: all(waits in groups.output(group) for group in (1, 2)), 60, "both wait")
        time.sleep(2)
        (tmp_path / "hold0").unlink()
        groups.wait_until(lambda: min(max(groups.commits(group)) for group in range(3)) > began + 3, 60, "they go on")
        groups.end_soon()
        groups.wait_all(120)
        for victim in (1, 2):
            pids = {line["pid"] for line in groups.steps(victim)}
            assert len(pids) == 2
            assert [line["step"] for line in groups.steps(victim) if line["committed"]] == sorted(
                groups.commits(victim)
            )
        _check_equal([groups.commits(group) for group in range(3)])


def _load(folder, width):
    booster = Booster()
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.LayerNorm(width))
    model.append(torch.nn.Linear(width, 1)).double()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return booster.load_checkpoint(folder, model=model, optimizer=optimizer, resume=True).step


@pytest.mark.slow
def test_random_kills_in_a_run_of_400_steps(tmp_path):
    """20 kills of whole groups, of which some fall into saves and into catching up."""
    draw = random.Random(5)
    with replica_groups(tmp_path, 3, save=3, sleep=0.05, width=256) as groups:
        groups.start_all()
        groups.wait_for(0, 3, 180)
        kills = []
        for _ in range(20):
            victim = draw.choice([0, 1, 2])
            time.sleep(draw.uniform(0.0, 3.0))
            # Of the others one has to have the state; the victim may be coming back, or save.
            others = [group for group in range(3) if group != victim]
            groups.wait_until(lambda others=others: any(map(groups.trains, others)), 120, f"{others} train")
            groups.kill(victim)
            kills.append(time.time())
            groups.wait_group(victim)
            groups.start(victim)
            if draw.random() < 0.5:
                time.sleep(draw.uniform(2.0, 8.0))
        groups.wait_until(
            lambda: max(max(groups.commits(each), default=0) for each in range(3)) >= 400, 600, "400 steps"
        )
        groups.end_soon(40)
        groups.wait_all(300)
        _check_equal([groups.commits(group) for group in range(3)])
        for line in (line for group in range(3) for line in groups.steps(group)):
            began = line["time"] - line["seconds"] - HEARTBEAT
            assert line["seconds"] < LIMIT * max(1, sum(began < kill < line["time"] for kill in kills))
    for group in range(3):
        (step,) = run_on_ranks(_load, 1, tmp_path / f"checkpoint-group{group}", 256)
        assert step > 0


@pytest.mark.slow
def test_a_lighthouse_that_comes_back_is_survived(tmp_path):
    with replica_groups(tmp_path, 2) as groups:
        groups.start_all()
        groups.wait_for(0, 3, 180)
        groups.lighthouse.kill()
        time.sleep(5)
        groups.lighthouse.start()
        groups.wait_for(0, max(groups.commits(0)) + 3)
        groups.end_soon()
        groups.wait_all()
        _check(groups, survivors=[0, 1], limit=60.0)  # of which it was away for some


@pytest.mark.slow
def test_a_lighthouse_that_stays_away_is_named(tmp_path):
    with replica_groups(tmp_path, 2, plugin={"quorum_timeout_seconds": 5}) as groups:
        groups.start_all()
        groups.wait_for(0, 3, 180)
        groups.lighthouse.kill()
        for group in range(2):
            assert groups.wait_group(group, 60) == [1]
            assert f"The lighthouse at {groups.lighthouse.address} does not answer" in groups.output(group)
        groups.lighthouse.start()
