from __future__ import annotations

import sys

import pytest

from booster_runtime.collectives.call_sites import NotedCall
from booster_runtime.watch.member import Standstill
from booster_runtime.watch.verdicts import Call, Collective, Record, Told, Verdicts

TEXT = "ValueError: bad"
NOTHING = Record()


def verdicts(hosts="aab"):
    run = Verdicts(list(hosts))
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
    run.lost(2, 100.5)
    assert set(run.news(())) == {0, 1, 3}
    assert speakers(run) == [0, 3]
    assert text(run).startswith("Booster: rank 2 died without a traceback:")


def test_a_rank_that_cannot_be_reached_is_named():
    run = verdicts()
    run.lost(2, 100.5, "could not be reached for 15 s")
    assert text(run) == "Booster: rank 2 could not be reached for 15 s: its machine or the network is down."


def test_only_the_first_failure_counts():
    run = verdicts()
    run.failed(1, TEXT, NOTHING)
    run.failed(0, "another", NOTHING)
    run.lost(2, 100.5)
    assert text(run) == "Booster: rank 1 failed: ValueError: bad"


def test_a_goodbye_is_no_death():
    run = verdicts()
    run.left(1)
    run.lost(1, 100.5)
    assert run.failure is None
    assert run.gone == {1: "ended normally"}


def test_a_death_before_the_goodbye_is_one():
    run = verdicts()
    run.ending(1, NOTHING)
    run.lost(1, 100.5)
    assert run.failure.rank == 1


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
    run.lost(2, 100.5)
    told = run.news(silent={1})[0]["text"]
    assert told.endswith(
        "\nBooster: all 5 ranks end. Rank 2 was process 102 on a. Last calls: rank 0 entered `step` #4; rank 1 did not "
        "answer (it entered `step` #4 when last heard of); rank 2 died (it entered `step` #4 when last heard of, 0.5 s "
        "before); rank "
        "3 made no such call yet; rank 4 ended normally.\n"
    )


def at(name, number, ranks=None, **counts):
    """The record of a rank that waits in a call."""
    call = Call(name, number, None if ranks is None else frozenset(ranks))
    return Record(call=call, last=Call(name, number), is_finished=False, counts={**counts, name: number})


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


def test_1024_ranks_that_ask_the_same_are_answered_at_one_rank_s_cost():
    run = verdicts(["a"] * 1024)
    for rank in range(1024):
        run.here(rank, Record(counts={"step": 4 if rank != 513 else 3}), 0.0, 100.0)
    assert _calls_in(run.missing, Call("step", 4), ()) < 10 * 1024
    assert run.missing(Call("step", 4), ()).startswith("rank 513 has not reached it")


def in_collective(
    number, ranks=None, operation="all_reduce", tensors=("4 Float",), *, group="gloo:0", left=None, **begun
):
    """The record of a rank that waits in a collective of torch's, in no call of ours."""
    collective = Collective(group, number, None if ranks is None else frozenset(ranks), operation)
    told = Told(collective=collective, tensors=tensors, left_seconds=left)
    begun = {f"gloo:{name[1:]}": last for name, last in begun.items()} | {group: number}
    return Record(collectives=(told,), begun=begun, knows_groups=True)


def went_through(record):
    """The record of a rank that has been through the collective in which another waits."""
    (told,) = record.collectives
    return Record(
        collectives=(Told(collective=told.collective, tensors=told.tensors, is_waiting=False),), begun=record.begun
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (in_collective(3, operation="all_gather", tensors=("4 Float", "8 Float")), "rank 1 calls `all_gather`"),
        (in_collective(3, tensors=("8 Float",)), "rank 1 calls `all_reduce` with 8 Float"),
        (in_collective(3, tensors=("4 BFloat16",)), "rank 1 calls `all_reduce` with 4 BFloat16"),
        (went_through(in_collective(3, tensors=("8 Float",))), "rank 1 calls `all_reduce` with 8 Float"),
    ],
)
def test_ranks_that_call_different_collectives_are_named(other, words):
    run = verdicts()
    run.here(1, other, 6.0 if other.collectives[0].is_waiting else 0.0, 100.0)
    told = waits(run, (0, in_collective(3), 6.0, 100.0))
    assert told.startswith("Booster: the ranks call different collectives as number 3 of their group: rank 0 calls")
    assert words in told


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (in_collective(3), in_collective(3)),
        # Ranks may send each other more or less in these.
        (in_collective(3, operation="all_to_all"), in_collective(3, operation="all_to_all", tensors=("8 Float",))),
        # Each is in a collective of its own group.
        (in_collective(3, [0, 2], group="gloo:1"), in_collective(3, [1, 2], group="gloo:2", tensors=("8 Float",))),
        # Rank 1 has begun the other's collective, in another thread perhaps, or its record does not tell.
        (in_collective(3, group="gloo:1"), in_collective(9, group="gloo:2", _1=3)),
        (in_collective(3, group="gloo:1"), Record(**{**vars(in_collective(9, group="gloo:2")), "knows_groups": False})),
    ],
)
def test_collectives_that_may_yet_be_completed_are_waited_for(mine, other):
    assert waits(verdicts(), (0, mine, 60.0, 100.0), (1, other, 60.0, 100.0)) is None


def test_ranks_that_wait_for_each_other_in_collectives_of_two_groups():
    first, second = in_collective(1, [0, 1], group="gloo:1"), in_collective(1, [0, 1], group="gloo:2")
    told = waits(verdicts(), (0, first, 6.0, 100.0), (1, second, 6.0, 100.0))
    assert "rank 0 waits in `all_reduce`, number 1 of the group of ranks 0 and 1, and rank 1 waits in" in told


def test_a_collective_and_a_call_in_which_ranks_wait_for_each_other():
    told = waits(verdicts(), (0, in_collective(4), 6.0, 100.0), (1, at("save", 1), 6.0, 100.0))
    assert told is None  # the record of rank 1 does not tell of collectives
    silent_group = Record(**{**vars(at("save", 1)), "begun": {"gloo:0": 3}, "knows_groups": True})
    told = waits(verdicts(), (0, in_collective(4), 6.0, 100.0), (1, silent_group, 6.0, 100.0))
    assert "rank 0 waits in `all_reduce`, number 4 of the group of all ranks, and rank 1 waits in `save` #1" in told


def test_other_ranks_are_asked_once_what_they_called_where_one_waits():
    run = verdicts()
    run.here(0, in_collective(3), 4.0, 100.0)
    assert run.places_to_ask() == []
    run.here(0, in_collective(3), 6.0, 102.0)
    assert run.places_to_ask() == [("gloo:0", 3)]
    assert run.places_to_ask() == []
    run.here(0, Record(), 0.0, 103.0)
    assert run.places_to_ask() == []
    run.here(0, in_collective(3), 6.0, 110.0)
    assert run.places_to_ask() == [("gloo:0", 3)]


def nccl(number, left, **record):
    waiting = in_collective(number, group="nccl:0", left=left)
    return Record(
        **{**vars(waiting), **vars(at("backward", 12)), **{k: vars(waiting)[k] for k in ("collectives", "begun")}}
    )


def test_missing_ranks_are_named_before_a_collective_ends_its_process():
    """NCCL aborts the process at its time limit, here after 600 s: the monitor has to speak before that."""
    run = verdicts()
    for now in range(0, 592, 60):
        assert (
            waits(
                run, (0, nccl(7, 600.0 - now), now + 1.0, float(now)), (1, nccl(7, 600.0 - now), now + 1.0, float(now))
            )
            is None
        )
    assert waits(run, (0, nccl(7, 8.0), 592.0, 592.0)) is None
    run.here(0, nccl(7, 6.5), 593.5, 593.5)
    run.tick(593.5)
    assert run.failure is not None  # within the time that it takes to tell all ranks
    run.here(2, Record(**{**vars(at("step", 11)), "begun": {"nccl:0": 6}, "knows_groups": True}), 0.0, 594.0)
    assert text(run) == (
        "Booster: `backward` #12, `all_reduce`, number 7 of the group of all ranks, is about to be ended at its time "
        "limit: rank 2 has not reached it; it entered `step` #11. Every rank must make the same calls in the "
        "same order."
    )
    assert {message["rank"] for message in run.news(()).values()} == {None}


@pytest.mark.parametrize("how", ["silent", "ended"])
def test_ranks_that_say_nothing_are_missing_in_a_collective_that_is_about_to_end_its_process(how):
    run = verdicts()
    if how == "ended":
        run.ending(2, Record(counts={"backward": 12}))
    run.here(1, nccl(7, 6.0), 594.0, 594.0)
    run.here(0, nccl(7, 6.0), 594.0, 594.0)
    run.tick(594.0)
    line = next(iter(run.news({2} if how == "silent" else ()).values()))["text"].splitlines()[0]
    assert ": rank 2 has not reached it; it " + ("did not answer" if how == "silent" else "ended normally") in line


def test_a_standstill_is_counted_from_the_last_change():
    standstill = Standstill()
    assert [standstill.look(state, now) for state, now in (("a", 0.0), ("a", 2.0), ("b", 3.0), ("b", 5.0))] == [
        0,
        2,
        0,
        2,
    ]
    assert [standstill.look(state, now) for state, now in ((None, 6.0), (None, 9.0), ("b", 10.0), ("b", 11.0))] == [
        0,
        0,
        0,
        1,
    ]


def test_collectives_that_differ_are_told_with_the_death_that_they_caused():
    run = verdicts()
    calls = [
        NotedCall(group="0", ranks=(0, 1), number=7, what=f"all_reduce of [{n}]", site=f"t.py:{n}") for n in (4, 8)
    ]
    run.called(1, calls[1])
    run.lost(1, 100.0)
    run.called(0, calls[0])
    told = run.news(())[0]["text"]
    assert told.startswith("Booster: rank 1 died without a traceback")
    assert "rank 0 calls all_reduce of [4] at t.py:4; rank 1 calls all_reduce of [8] at t.py:8" in told
