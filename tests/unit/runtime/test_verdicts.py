from __future__ import annotations

import sys

import pytest

from booster_runtime.watch.idleness import Idleness
from booster_runtime.watch.records import Record
from booster_runtime.watch.verdicts import Verdicts

TEXT = "ValueError: bad"
NOTHING = Record()


def verdicts(hosts="aab", timeout_seconds=600.0):
    run = Verdicts(list(hosts), timeout_seconds)
    for rank in range(len(hosts)):
        run.joined(rank, 100 + rank)
    return run


def speakers(run):
    return [rank for rank, message in run.news(()).items() if message["speaks"]]


def text(run):
    (line,) = {message["text"].splitlines()[0] for message in run.news(()).values()}
    return line


def test_who_says_that_rank_0_is_lost():
    run = verdicts("aaabb")
    assert [run.speaks_without_server(rank) for rank in range(5)] == [False, True, False, True, False]


def test_an_exception_is_told_to_all():
    run = verdicts()
    run.failed(1, TEXT, NOTHING)
    assert set(run.news(())) == {0, 1, 2}
    assert text(run) == "Booster: rank 1 failed: ValueError: bad"


def test_the_lowest_rank_of_each_host_says_it():
    run = verdicts("abbcc")
    run.failed(2, TEXT, NOTHING)
    assert speakers(run) == [0, 1, 3]


def test_the_failing_rank_prints_its_traceback_instead():
    run = verdicts("abbcc")
    run.failed(3, TEXT, NOTHING)
    assert speakers(run) == [0, 1, 4]


def test_a_lost_rank_is_named():
    run = verdicts("aabb")
    run.lost(2)
    assert set(run.news(())) == {0, 1, 3}
    assert speakers(run) == [0, 3]
    assert text(run).startswith("Booster: rank 2 died without a traceback:")


def test_a_rank_that_cannot_be_reached_is_named():
    run = verdicts()
    run.lost(2, "could not be reached for 15 s")
    assert text(run) == "Booster: rank 2 could not be reached for 15 s: its machine or the network is down."


def test_only_the_first_failure_counts():
    run = verdicts()
    run.failed(1, TEXT, NOTHING)
    run.failed(0, "another", NOTHING)
    run.lost(2)
    assert text(run) == "Booster: rank 1 failed: ValueError: bad"


def test_a_goodbye_is_no_death():
    run = verdicts()
    run.left(1)
    run.lost(1)
    assert run.failure is None
    assert run.gone == {1: "ended normally"}


def test_a_death_before_the_goodbye_is_one():
    run = verdicts()
    run.ending(1, NOTHING)
    run.lost(1)
    assert run.failure[0] == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_who_has_left_is_told_nothing(rank):
    run = verdicts()
    run.left(rank)
    run.failed(1, TEXT, NOTHING)
    assert rank not in run.news(())


def test_the_last_place_of_each_rank_is_told():
    run = verdicts("aaaaa")
    for rank in range(3):
        run.here(rank, at("step", 4), 0.0, 100.0)
    run.left(4)
    run.lost(2)
    told = run.news(silent={1})[0]["text"]
    assert told.endswith(
        "\nBooster: all 5 ranks end. Rank 2 was process 102 on a. Last calls: rank 0 entered `step` #4; rank 1 did not "
        "answer (it entered `step` #4 when last heard of); rank 2 died (it entered `step` #4 when last heard of); rank "
        "3 made no such call yet; rank 4 ended normally.\n"
    )


def at(name, count, ranks=None, **counts):
    """The record of a rank that waits in a call."""
    return Record(
        call=(name, count),
        last=(name, count),
        is_finished=False,
        ranks=None if ranks is None else frozenset(ranks),
        counts={**counts, name: count},
    )


def waits(run, *waits_of_ranks):
    """Let ranks wait, and return what comes of it."""
    for rank, record, seconds, now in waits_of_ranks:
        run.here(rank, record, seconds, now)
    run.tick(now)
    return None if run.failure is None else text(run)


def test_a_rank_that_has_ended_is_not_waited_for():
    run = verdicts()
    run.ending(1, Record(counts={"step": 5}))
    told = waits(run, (0, at("save_model", 1, step=5), 3.0, 100.0))
    assert told.startswith(
        "Booster: rank 1 ended normally while rank 0 waits in `save_model` #1, which it never called."
    )


def test_a_rank_that_made_the_call_before_it_ended_is_not_to_blame():
    run = verdicts()
    run.ending(1, Record(counts={"step": 5, "save_model": 1}))
    assert waits(run, (0, at("save_model", 1, step=5), 100.0, 100.0)) is None


def test_ranks_that_wait_for_each_other_in_different_calls():
    told = waits(verdicts(), (0, at("save_model", 1, step=5), 6.0, 100.0), (1, at("backward", 6, step=5), 6.0, 100.5))
    assert "rank 0 waits in `save_model` #1, and rank 1 waits in `backward` #6" in told


@pytest.mark.parametrize(
    ("first", "second", "seconds", "at_seconds"),
    [
        (at("save_model", 1, backward=6), at("backward", 6), 60.0, 100.5),  # rank 1 is only slow
        (at("save_model", 1), at("save_model", 1), 60.0, 100.5),  # both wait for rank 2
        (at("save_model", 1), at("backward", 6), 4.0, 100.5),  # not for long
        (at("save_model", 1), at("backward", 6), 60.0, 104.0),  # rank 0 has not said so again
        (at("save_model", 1), Record(counts={"backward": 6}), 60.0, 100.5),
        (at("save_model", 1), at("forward", 6, [1, 2]), 60.0, 100.5),  # rank 1 waits for rank 2 alone
    ],
)
def test_ranks_that_may_still_come_are_waited_for(first, second, seconds, at_seconds):
    assert waits(verdicts(), (0, first, 60.0, 100.0), (1, second, seconds, at_seconds)) is None


def test_a_rank_that_goes_on_waits_no_more():
    run = verdicts()
    run.here(0, at("save_model", 1), 60.0, 100.0)
    run.here(0, Record(counts={"save_model": 1}), 0.0, 100.5)
    assert waits(run, (1, at("backward", 6), 60.0, 101.0)) is None


def test_ranks_that_wait_for_each_other_within_a_group():
    told = waits(verdicts(), (0, at("save_model", 1), 6.0, 100.0), (1, at("forward", 6, [0, 1]), 6.0, 100.5))
    assert "rank 0 waits in `save_model` #1, and rank 1 waits in `forward` #6" in told


def test_a_rank_that_has_ended_and_takes_no_part_is_not_waited_for():
    run = verdicts()
    run.ending(2, Record(counts={"forward": 5}))
    assert waits(run, (0, at("forward", 6, [0, 1]), 100.0, 100.0)) is None
    run.ending(1, Record(counts={"forward": 5}))
    told = waits(run, (0, at("forward", 6, [0, 1]), 100.0, 101.0))
    assert told.startswith("Booster: rank 1 ended normally while rank 0 waits in `forward` #6")


def test_a_rank_that_ends_normally_says_nothing():
    run = verdicts("aaa")
    run.ending(0, NOTHING)
    assert waits(run, (2, at("step", 1), 3.0, 1.0)) is not None
    assert speakers(run) == [1]


def test_a_call_that_nears_the_time_limit_is_told_once():
    run = verdicts(timeout_seconds=100.0)
    assert run.here(0, at("step", 4), 0.0, 0.0) is None
    assert run.here(0, at("step", 4), 0.0, 80.0) is None
    told = "Booster: rank 0 has been in `step` #4 for 90 s; the time limit is 100 s."
    assert run.here(0, at("step", 4), 0.0, 90.0) == told
    assert run.here(0, at("step", 4), 0.0, 95.0) is None
    assert run.here(0, at("step", 5), 0.0, 200.0) is None


def _calls_in(function, *args):
    """Return how many functions a call calls: its cost, whatever else the machine does."""
    num_calls = 0

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return num_calls


def test_1024_ranks_that_wait_are_looked_through_quickly():
    run = verdicts(["a"] * 1024)
    for rank in range(1, 1024):
        run.here(rank, at("step" if rank % 2 else "clip", 4, step=4, clip=4), 60.0, 100.0)
    assert _calls_in(run.tick, 100.0) < 20 * 1024  # a few for each rank; pairs of them are 500 times as many
    assert run.failure is None


def test_idleness_is_counted_from_the_last_sign_of_work():
    idleness = Idleness()
    call = ("step", 1)
    assert idleness.look(call, 0.0, 0.0, is_waiting=False) == 0.0
    assert idleness.look(call, 1.0, 0.1, is_waiting=False) == 1.0
    assert idleness.look(call, 2.0, 1.0, is_waiting=False) == 0.0  # it has computed
    assert idleness.look(call, 3.0, 1.1, is_waiting=False) == 1.0
    assert idleness.look(call, 4.0, 2.0, is_waiting=True) == 2.0  # it polls
    assert idleness.look(("step", 2), 5.0, 2.0, is_waiting=True) == 0.0
    assert idleness.look(None, 6.0, 2.0, is_waiting=False) == 0.0
