from __future__ import annotations

import pytest

from booster_runtime.liveness.member import Idleness
from booster_runtime.liveness.verdicts import DISAGREE, HOLD_SECONDS, Verdicts

TEXT = "Traceback of the failure"


def verdicts(hosts="aab", *, speakers_end_first=False):
    run = Verdicts(list(hosts), speakers_end_first=speakers_end_first)
    for rank in range(len(hosts)):
        run.joined(rank, 100 + rank)
    return run


def news(messages):
    return {rank: message for rank, message in messages if message["type"] == "failure"}


def turns(messages):
    return [rank for rank, message in messages if message["type"] == "go"]


def test_the_heirs_of_rank_0():
    run = Verdicts(["a", "a", "a", "b", "b"], speakers_end_first=False)
    assert [run.joined(rank, 1)[0][1]["is_heir"] for rank in range(5)] == [False, True, False, True, False]


def test_an_exception_is_told_to_all():
    told = news(verdicts().failed(1, TEXT, 0.0, is_derived=False))
    assert set(told) == {0, 1, 2}
    assert all(
        (message["rank"], message["host"], message["pid"], message["text"], message["world"]) == (1, "a", 101, TEXT, 3)
        for message in told.values()
    )
    assert {rank: message["own"] for rank, message in told.items()} == {0: False, 1: True, 2: False}


def test_the_failing_rank_speaks_on_its_host_and_the_lowest_rank_on_others():
    told = news(verdicts("abbcc").failed(2, TEXT, 0.0, is_derived=False))
    assert [rank for rank, message in told.items() if message["speaks"]] == [0, 2, 3]


def test_a_lost_rank_is_spoken_for():
    told = news(verdicts("aabb").lost(2))
    assert set(told) == {0, 1, 3}
    assert [rank for rank, message in told.items() if message["speaks"]] == [0, 3]
    assert told[0]["text"] is None


def test_speakers_end_last():
    run = verdicts("aaaa")
    messages = run.failed(2, TEXT, 0.0, is_derived=False)
    assert {rank: message["waits"] for rank, message in news(messages).items()} == {
        0: True,  # it holds the server
        1: False,
        2: True,
        3: False,
    }
    assert turns(messages) == []
    assert turns(run.lost(1)) == []
    assert turns(run.lost(3)) == [0]
    assert turns(run.lost(0)) == [2]


def test_speakers_end_first_where_an_agent_reports():
    run = verdicts("aaaa", speakers_end_first=True)
    messages = run.failed(2, TEXT, 0.0, is_derived=False)
    assert {rank for rank, message in news(messages).items() if message["waits"]} == {0, 1, 3}
    assert turns(messages) == []
    assert turns(run.lost(2)) == [0, 1, 3]


def test_a_rank_that_waits_for_nobody_goes_at_once():
    run = verdicts("a")
    assert turns(run.failed(0, TEXT, 0.0, is_derived=False)) == [0]


def test_a_consequence_waits_for_its_cause():
    run = verdicts()
    assert run.failed(0, "connection closed", 5.0, is_derived=True) == []
    assert run.is_holding
    assert run.tick(5.0 + HOLD_SECONDS / 2) == []
    told = news(run.failed(1, TEXT, 5.6, is_derived=False))
    assert told[0]["text"] == TEXT
    assert not run.is_holding


def test_a_consequence_without_a_cause_is_the_failure():
    run = verdicts()
    run.failed(0, "connection closed", 5.0, is_derived=True)
    assert news(run.tick(5.0 + HOLD_SECONDS))[1]["text"] == "connection closed"


def test_a_death_is_the_cause_of_a_consequence():
    run = verdicts()
    run.failed(0, "connection closed", 5.0, is_derived=True)
    told = news(run.lost(1))
    assert (told[0]["rank"], told[0]["text"]) == (1, None)


def test_only_the_first_failure_counts():
    run = verdicts()
    run.failed(1, TEXT, 0.0, is_derived=False)
    assert run.failed(0, "another", 0.1, is_derived=False) == []
    assert news(run.lost(2)) == {}


def test_a_goodbye_is_no_death():
    run = verdicts()
    assert run.left(1) == []
    assert run.lost(1) == []
    assert run.gone == {1: "has ended normally"}


@pytest.mark.parametrize("rank", [0, 2])
def test_who_has_left_is_told_nothing(rank):
    run = verdicts()
    run.left(rank)
    assert rank not in news(run.failed(1, TEXT, 0.0, is_derived=False))


@pytest.mark.parametrize("late", [0, 1])
def test_who_comes_after_the_failure_is_told_of_it(late):
    run = Verdicts(["a", "a", "a"], speakers_end_first=False)
    run.joined(2, 102)
    run.failed(2, TEXT, 0.0, is_derived=False)
    messages = run.joined(late, 100)
    assert news(messages)[late]["text"] == TEXT
    assert not news(messages)[late]["speaks"]
    assert turns(messages) == ([0] if late == 0 else [])


def at(name, count, ranks=None, **counts):
    """The record of a rank that waits in a call."""
    return {"call": [name, count], "ranks": ranks, "counts": {**counts, name: count}}


def told(messages):
    (text,) = {message["text"] for message in news(messages).values()}
    return text


def test_a_rank_that_has_ended_is_not_waited_for():
    run = verdicts()
    assert run.ending(1, {"call": None, "counts": {"step": 5}}) == []
    messages = run.waits(0, at("save_model", 1, step=5), 3.0, 100.0)
    assert told(messages).startswith("rank 1 ended normally while rank 0 waits in `save_model` #1")
    assert {message["how"] for message in news(messages).values()} == {DISAGREE}


def test_a_rank_that_made_the_call_before_it_ended_is_not_to_blame():
    run = verdicts()
    run.ending(1, {"call": None, "counts": {"step": 5, "save_model": 1}})
    assert run.waits(0, at("save_model", 1, step=5), 100.0, 100.0) == []


def test_ranks_that_wait_for_each_other_in_different_calls():
    run = verdicts()
    assert run.waits(0, at("save_model", 1, step=5), 6.0, 100.0) == []
    messages = run.waits(1, at("backward", 6, step=5), 6.0, 100.5)
    assert "rank 0 waits in `save_model` #1, and rank 1 waits in `backward` #6" in told(messages)


@pytest.mark.parametrize(
    ("first", "second", "seconds", "at_seconds"),
    [
        (at("save_model", 1, backward=6), at("backward", 6), 60.0, 100.5),  # rank 1 is only slow
        (at("save_model", 1), at("save_model", 1), 60.0, 100.5),  # both wait for rank 2
        (at("save_model", 1), at("backward", 6), 4.0, 100.5),  # not for long
        (at("save_model", 1), at("backward", 6), 60.0, 104.0),  # rank 0 has not said so again
        (at("save_model", 1), {"call": None, "counts": {"backward": 6}}, 60.0, 100.5),
        (at("save_model", 1), at("forward", 6, [1, 2]), 60.0, 100.5),  # rank 1 waits for rank 2 alone
    ],
)
def test_ranks_that_may_still_come_are_waited_for(first, second, seconds, at_seconds):
    run = verdicts()
    assert run.waits(0, first, 60.0, 100.0) == []
    assert run.waits(1, second, seconds, at_seconds) == []


def test_ranks_that_wait_for_each_other_within_a_group():
    run = verdicts()
    assert run.waits(0, at("save_model", 1), 6.0, 100.0) == []
    messages = run.waits(1, at("forward", 6, [0, 1]), 6.0, 100.5)
    assert "rank 0 waits in `save_model` #1, and rank 1 waits in `forward` #6" in told(messages)


def test_a_rank_that_has_ended_and_takes_no_part_is_not_waited_for():
    run = verdicts()
    run.ending(2, {"call": None, "counts": {"forward": 5}})
    assert run.waits(0, at("forward", 6, [0, 1]), 100.0, 100.0) == []
    run.ending(1, {"call": None, "counts": {"forward": 5}})
    messages = run.waits(0, at("forward", 6, [0, 1]), 100.0, 101.0)
    assert told(messages).startswith("rank 1 ended normally while rank 0 waits in `forward` #6")


def test_a_rank_that_ends_normally_is_not_told_to_end():
    run = verdicts("aaa")
    run.ending(0, {"counts": {}})
    messages = run.waits(2, at("step", 1), 3.0, 1.0)
    assert {rank for rank, message in news(messages).items() if message["speaks"]} == {2}
    assert turns(messages) == []
    assert turns(run.lost(1)) == [0, 2]


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
