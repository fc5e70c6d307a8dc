"""What is said of the ranks that others wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from booster_runtime.watch.verdicts import Call, Record, Verdicts


def at(name, count, *, finished, **counts):
    message = {"counts": {name: count, **counts}, "last": [name, count], "finished": finished}
    return Record.parse(message, 3)


def run_at(records):
    run = Verdicts(["a"] * len(records))
    for rank, record in enumerate(records):
        run.joined(rank, 100 + rank)
        if isinstance(record, Record):
            run.here(rank, record, 0.0, 0.0)
        elif record == "ended":
            run.ending(rank, Record())
        elif record == "died":
            run.lost(rank, 0.0)
    return run


HERE = at("step", 12, finished=False)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [HERE, at("backward", 11, finished=True, step=11)],
            "rank 1 has not reached it; it last finished `backward` #11.",
        ),
        ([HERE, at("save", 1, finished=False, step=11)], "rank 1 has not reached it; it entered `save` #1."),
        ([HERE, "ended"], "rank 1 has not reached it; it ended normally."),
        ([HERE, "died"], "rank 1 has not reached it; it died (it made no such call yet when last heard of)."),
        (
            [HERE, "ended", at("step", 11, finished=True)],
            "ranks 1 and 2 have not reached it; rank 1 ended normally; rank 2 last finished `step` #11.",
        ),
        ([HERE, None], "rank 1 has not reached it; it made no such call yet."),
        (
            [HERE, at("step", 13, finished=False)],
            "every rank has reached it, so ranks call different collectives in it",
        ),
    ],
)
def test_where_the_missing_ranks_are(records, words):
    assert run_at(records).missing(Call("step", 12), silent=()).startswith(words)


def test_ranks_that_take_no_part_in_a_call_are_not_missing_in_it():
    run = run_at([HERE, "ended", "ended"])
    missing = run.missing(Call("step", 12, frozenset((0, 2))), silent=())
    assert missing.startswith("rank 2 has not reached it; it ended normally")
    ended = run.ended([0], Call("step", 12, frozenset((0, 1))))
    assert ended.startswith("rank 1 ended normally while rank 0 waits in `step` #12")
    ended = run.ended([0], Call("step", 12))
    assert ended.startswith("ranks 1 and 2 ended normally while rank 0 waits in `step` #12")
    assert run_at([HERE, "died"]).ended([0], Call("step", 12)) is None


def test_all_ranks_in_a_call_are_named_when_one_of_them_has_waited_long_enough():
    run = run_at([Record()] * 3)
    save, reduction = at("save", 1, finished=False), at("reduction", 3, finished=False)
    for rank, record, idle in ((0, save, 6.0), (1, reduction, 0.0), (2, reduction, 6.0)):
        run.here(rank, replace(record, call=record.last), idle, now=10.0)
    run.tick(10.0)
    (message, *_) = run.news(()).values()
    assert "rank 0 waits in `save` #1, and ranks 1 and 2 wait in `reduction` #3" in message["text"]


def test_a_rank_that_did_not_answer_is_said_not_to_have():
    run = run_at([HERE, at("step", 11, finished=True)])
    assert "it did not answer (it last finished `step` #11 when last heard of)." in run.missing(Call("step", 12), {1})


def test_many_missing_ranks_are_counted():
    text = run_at([at("step", 11, finished=True)] * 30).missing(Call("step", 12), silent=())
    assert text.count("8, 9 and 20 others") == 2
    assert "last finished `step` #11" in text
