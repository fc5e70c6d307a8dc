"""What the monitor takes for a failure, and what it says of it."""

import json
import sys
from dataclasses import replace

import pytest

from booster_runtime.watch.failure_detector import FailureDetector, Point, Record
from booster_runtime.watch.member import StallTimer

NOW = 100.0


def at(name, number, ranks=None, *, seconds=0.0, finished=False, **counts):
    """The record of a rank that is in a call, or has finished it."""
    call = Point(name, number, ranks)
    return Record(
        waits=() if finished else (call,),
        last=call[:2] and Point(name, number),
        is_finished=finished,
        counts={**counts, name: number},
        seconds=seconds,
    )


def torchs(number, what=("all_reduce", "4 Float"), *, group="gloo:0", ranks=None, seconds=60.0, knows=True, **begun):
    """The record of a rank that waits in a collective of torch's, in no call of ours."""
    counts = {f"gloo:{name[1:]}": last for name, last in begun.items()} | {group: number}
    return Record(waits=(Point(group, number, ranks, what),), counts=counts, knows_groups=knows, seconds=seconds)


def verdicts(*records, hosts="aaa"):
    """What is known of ranks: a record, the words "ended" or "died", or ``None`` of one that has said nothing."""
    run = FailureDetector(hosts)
    for rank in range(len(hosts)):
        run.joined(rank, 100 + rank)
    for rank, record in enumerate(records):
        if isinstance(record, Record):
            run.here(rank, record, NOW)
        elif record == "died":
            run.left(rank, NOW, "died")
        elif record is not None:
            if record != "ended":
                run.here(rank, record[1], NOW)
            run.ending(rank)
    return run


def judged(*records, hosts="aaa"):
    run = verdicts(*records, hosts=hosts)
    run.tick(NOW + 0.5)
    return run.failure


@pytest.mark.parametrize(("victim", "speakers"), [(2, [0, 1, 3]), (3, [0, 1, 4])])
@pytest.mark.parametrize("how", ["raised", "died"])
def test_the_lowest_rank_of_each_host_that_goes_on_says_it(victim, speakers, how):
    run = verdicts(hosts="abbcc")
    assert [run.speaks_without_server(rank) for rank in range(5)] == [False, True, False, True, False]
    run.failed(victim, "ValueError: bad") if how == "raised" else run.left(victim, NOW, "died")
    run.failed(0, "another")  # only the first counts
    told = run.news(NOW)
    assert [rank for rank, message in told.items() if message["reports_for_host"]] == speakers
    assert set(told) == {0, 1, 2, 3, 4} - ({victim} if how == "died" else set())
    expected = "died without a traceback" if how == "died" else "failed: ValueError: bad\n"
    assert all(message["text"].startswith(f"Booster: rank {victim} {expected}") for message in told.values())


def test_a_rank_that_cannot_be_reached_is_named():
    run = verdicts()
    run.left(2, NOW, "could not be reached for 15 s")
    assert run.failure == "rank 2 could not be reached for 15 s: its machine or the network is down."


def test_a_goodbye_is_no_death_and_a_death_before_it_is_one():
    run = verdicts()
    run.left(1, NOW, None)
    assert run.failure is None
    run.ending(2)
    run.left(2, NOW, "died")
    assert run.failure.startswith("rank 2 died")
    assert set(run.news(NOW)) == {0}


def test_the_last_place_of_each_rank_is_told():
    run = verdicts(*[at("step", 4)] * 3, None, "ended", hosts="aaaaa")
    run.left(2, NOW + 5, "died")
    run.here(0, at("step", 4, finished=True), NOW + 5)
    assert run.news(NOW + 5)[0]["text"].endswith(
        "\nBooster: all 5 ranks end. Rank 2 was process 102 on a. Last calls: rank 0 last finished `step` #4; rank 1 "
        "gave no sign of life (it entered `step` #4 when last heard of, 5.0 s before); rank 2 died (it entered `step` "
        "#4 when last heard of, 5.0 s before); rank 3 made no such call yet; rank 4 ended normally.\n"
    )


HERE = at("step", 12)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [HERE, at("backward", 11, finished=True, step=11)],
            "rank 1 has not reached it; it last finished `backward` #11.",
        ),
        ([HERE, at("save", 1, step=11)], "rank 1 has not reached it; it entered `save` #1."),
        ([HERE, "ended"], "rank 1 has not reached it; it ended normally."),
        ([HERE, None], "rank 1 has not reached it; it made no such call yet."),
        (
            [HERE, "ended", at("step", 11, finished=True)],
            "ranks 1 and 2 have not reached it; rank 1 ended normally; rank 2 last finished `step` #11.",
        ),
        ([HERE, at("step", 13)], "every rank has reached it, so ranks call different collectives in it"),
        ([at("step", 11, finished=True)] * 30, "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 20 others have not reached it"),
    ],
)
def test_where_the_missing_ranks_are(records, words):
    run = verdicts(*records, hosts="a" * len(records))
    assert run.missing(Point("step", 12), NOW).startswith(words)


def test_ranks_that_take_no_part_in_a_call_are_not_missing_in_it():
    run = verdicts(HERE, "ended", "ended")
    assert run.missing(Point("step", 12, (0, 2)), NOW).startswith("rank 2 has not reached it; it ended normally")
    assert run.ended(Point("step", 12, (0, 1)), [0]).startswith(
        "rank 1 ended normally while rank 0 waits in `step` #12"
    )
    assert verdicts(HERE, "died").ended(Point("step", 12), [0]) is None


SAVES, STEPS = at("save_model", 1, seconds=6.0, step=5), at("backward", 6, seconds=6.0, step=5)
OF_GROUP = {"ranks": (0, 1)}
IN_NCCL = torchs(7, group="nccl:0", seconds=600.0)
OVERDUE = replace(
    IN_NCCL,
    waits=(Point("backward", 12), *IN_NCCL.waits),
    counts={**IN_NCCL.counts, "backward": 12},
    overdue=IN_NCCL.waits[0],
)
GONE_ON = replace(
    OVERDUE,
    waits=(OVERDUE.waits[0], *torchs(8, group="nccl:0").waits),
    counts={"nccl:0": 8, "backward": 12},
    overdue=None,
    knows_groups=True,
)
RAISED = {"broken": Point("forward", 6, (0, 1)), "error": "ValueError: bad"}
GATHERS = at("forward", 6, (0, 1), seconds=6.0)
LEFT = replace(at("forward", 6, (0, 1)), **RAISED)
MEETS = replace(at("next call", 1, (0, 1), seconds=6.0, forward=6), **RAISED)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [GATHERS, LEFT],
            "rank 1 left `forward` #6 by an exception that its script caught, and rank 0 waits in `forward` #6: ValueE",
        ),
        ([GATHERS, MEETS], "rank 1 left `forward` #6 by an exception that its script caught, and rank 0 waits in `for"),
        ([at("step", 5, seconds=6.0, forward=6), LEFT], "caught, and rank 0 waits in `step` #5: ValueError: bad"),
        ([SAVES, ("ended", at("step", 5))], "rank 1 ended normally while rank 0 waits in `save_model` #1, which it"),
        ([torchs(4), ("ended", torchs(3))], "rank 1 ended normally while rank 0 waits in `all_reduce` of 4 Float, num"),
        ([SAVES, STEPS], "calls: rank 0 waits in `save_model` #1, and rank 1 waits in `backward` #6."),
        ([SAVES, at("forward", 6, (0, 1), seconds=6.0)], "and rank 1 waits in `forward` #6."),
        ([SAVES, STEPS, replace(STEPS, seconds=0.0)], "`save_model` #1, and ranks 1 and 2 wait in `backward` #6."),
        (
            [torchs(3), torchs(3, ("all_gather",))],
            (
                "rank 0 waits in `all_reduce` of 4 Float, number 3 of the group of all ranks, and rank 1 waits in "
                "`all_gather`, number 3 of the group of all ranks."
            ),
        ),
        ([torchs(3), torchs(3, ("all_reduce", "8 Float"))], "and rank 1 waits in `all_reduce` of 8 Float, number 3"),
        (
            [torchs(1, group="gloo:1", **OF_GROUP), torchs(1, group="gloo:2", **OF_GROUP)],
            "number 1 of the group of ranks 0 and 1, and rank 1 waits in",
        ),
        (
            [torchs(4), replace(SAVES, counts={"save_model": 1, "gloo:0": 3}, knows_groups=True)],
            "number 4 of the group of all ranks, and rank 1 waits in `save_model` #1",
        ),
        (
            # Ranks that send nothing back go on to the next collective.
            [OVERDUE, GONE_ON, replace(at("step", 11), knows_groups=True)],
            "has come to its time limit: rank 2 has not reached it; it entered `step` #11.",
        ),
        (
            [OVERDUE, OVERDUE, at("step", 11)],
            (
                "`backward` #12, `all_reduce` of 4 Float, number 7 of the group of all ranks, has come to its time "
                "limit: rank 2 has not reached it; it entered `step` #11. Every rank must make the same calls in the "
                "same order."
            ),
        ),
        ([OVERDUE, OVERDUE, "ended"], "rank 2 ended normally while ranks 0 and 1 wait in `backward` #12, which it"),
    ],
)
def test_ranks_that_wait_for_what_never_comes_are_named(records, words):
    assert words in judged(*records)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (SAVES, ("ended", at("save_model", 1))),  # it made the call before it ended
        (at("forward", 6, (0, 2), seconds=99.0), ("ended", at("forward", 5))),  # it takes no part
        (at("save_model", 1, seconds=60.0, backward=6), STEPS),  # rank 1 is only slow
        (SAVES, SAVES),  # both wait for rank 2
        (SAVES, replace(STEPS, seconds=4.0)),  # not for long
        (SAVES, Record(counts={"backward": 6})),
        (SAVES, at("forward", 6, (1, 2), seconds=60.0)),  # rank 1 waits for rank 2 alone
        (torchs(3), torchs(3)),
        (torchs(3, ranks=(0, 2), group="gloo:1"), torchs(3, ("all_gather",), ranks=(1, 2), group="gloo:2")),
        # Rank 1 has begun the other's collective, in another thread perhaps, or its record does not tell.
        (torchs(3, group="gloo:1"), torchs(9, group="gloo:2", _1=3)),
        (torchs(3, group="gloo:1"), torchs(9, group="gloo:2", knows=False)),
        (torchs(4), SAVES),
        (replace(GATHERS, seconds=4.0), LEFT),  # not for long
        (MEETS, LEFT),  # both have left it
        (at("step", 5, seconds=6.0, forward=5), LEFT),  # has not come to it
        (at("forward", 6, (0, 2), seconds=6.0), LEFT),  # waits for rank 2 alone
    ],
)
def test_ranks_that_may_still_come_are_waited_for(mine, other):
    assert judged(mine, other) is None


def test_a_wait_counts_while_the_rank_goes_on_to_say_so():
    run = verdicts(SAVES)
    run.here(1, STEPS, NOW + 4.0)
    run.tick(NOW + 4.5)
    assert run.failure is None
    run.here(0, SAVES, NOW + 5.0)
    run.tick(NOW + 5.5)
    assert run.failure is not None


def test_a_record_travels_as_json():
    record = replace(OVERDUE, last=Point("backward", 12, (0, 1)))
    assert vars(Record.parse(json.loads(json.dumps(vars(record))))) == vars(replace(record, waits=list(record.waits)))


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


def test_1024_ranks_are_looked_through_quickly():
    waiting = [at("step" if rank % 2 else "clip", 4, step=4, clip=4, seconds=60.0) for rank in range(1, 1024)]
    run = verdicts(Record(), *waiting, hosts="a" * 1024)
    assert _calls_in(run.tick, NOW) < 30 * 1024  # a few for each rank; pairs of them are 500 times as many
    assert run.failure is None
    run.here(513, Record(counts={"step": 3}), NOW)
    run.here(0, Record(counts={"step": 4}), NOW)
    assert _calls_in(run.missing, Point("step", 4), NOW) < 10 * 1024
    assert run.missing(Point("step", 4), NOW).startswith("rank 513 has not reached it")


def test_a_standstill_is_counted_from_the_last_change():
    standstill = StallTimer()
    looks = [("a", 0.0), ("a", 2.0), ("b", 3.0), ("b", 5.0), (None, 6.0), (None, 9.0), ("b", 10.0), ("b", 11.0)]
    assert [standstill.look(state, now) for state, now in looks] == [0, 2, 0, 2, 0, 0, 0, 1]
