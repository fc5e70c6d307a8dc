from __future__ import annotations

import pytest

from booster_core.errors import MissingRanksError
from booster_core.ranks.progress import PROGRESS, Progress, describe_progress, naming_missing_ranks
from booster_core.ranks.world import current_world
from booster_runtime.liveness.wire import Lines, encode


@pytest.fixture(autouse=True)
def _fresh():
    PROGRESS.clear()
    yield
    PROGRESS.clear()


def at(name, count, *, finished, **counts):
    return {"counts": {name: count, **counts}, "last": [name, count], "finished": finished}


def test_calls_are_counted():
    progress = Progress()
    assert [progress.enter("step"), progress.enter("step"), progress.enter("backward")] == [1, 2, 1]
    assert progress.record() == {
        "counts": {"step": 2, "backward": 1},
        "last": ("backward", 1),
        "finished": False,
        "call": ("step", 1),
        "ranks": None,
    }
    progress.finish("step")
    assert progress.record()["last"] == ("step", 2)
    assert progress.record()["finished"]


def test_a_context_notes_beginning_and_end():
    with naming_missing_ranks("step"):
        assert PROGRESS.record() == {
            "counts": {"step": 1},
            "last": ("step", 1),
            "finished": False,
            "call": ("step", 1),
            "ranks": None,
        }
        with naming_missing_ranks("reduction"):
            assert PROGRESS.call == ("step", 1)
        assert PROGRESS.call == ("step", 1)
    assert PROGRESS.is_finished
    assert PROGRESS.call is None


def test_the_ranks_of_the_outermost_call_are_noted():
    with naming_missing_ranks("forward", (2, 3)):
        with naming_missing_ranks("gather of parameters"):
            assert PROGRESS.record()["ranks"] == [2, 3]
        assert PROGRESS.record()["ranks"] == [2, 3]
    with naming_missing_ranks("step"):
        assert PROGRESS.record()["ranks"] is None


def fail_in_step(error, ranks=None):
    with naming_missing_ranks("step", ranks):
        raise error


@pytest.mark.parametrize("error", [ValueError("timed out"), RuntimeError("bad shape"), MissingRanksError("timed out")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught:
        fail_in_step(error)
    assert caught.value is error


def test_a_call_that_failed_is_not_waited_in_any_more():
    with pytest.raises(ValueError, match="bad"):
        fail_in_step(ValueError("bad"))
    assert PROGRESS.call is None


class _Monitor:
    def __init__(self, records):
        self.records = records

    def ask_progress(self):
        return self.records


@pytest.mark.parametrize(
    "text",
    ["[gloo] Connection closed by peer [127.0.0.1]:1", "Rank 0 has ended, or its memory can't be read any more: x"],
)
def test_a_peer_that_has_ended_normally_is_named(monkeypatch, text):
    gone = {"gone": "has ended normally", "counts": {"step": 0}}
    monkeypatch.setattr(current_world(), "monitor", _Monitor({0: gone, 1: {"counts": {"step": 1}}, 2: gone}))
    with pytest.raises(MissingRanksError, match="ranks 0 and 2 ended normally while rank 0 waits in `step` #1"):
        fail_in_step(RuntimeError(text))


def test_ranks_that_take_no_part_in_a_call_are_not_missing_in_it(monkeypatch):
    gone = {"gone": "has ended normally", "counts": {"step": 0}}
    monkeypatch.setattr(current_world(), "monitor", _Monitor({0: {"counts": {"step": 2}}, 1: gone, 2: gone}))
    with pytest.raises(MissingRanksError, match="rank 1 ended normally while rank 0 waits in `step` #1"):
        fail_in_step(RuntimeError("Connection closed by peer"), [0, 1])
    with pytest.raises(MissingRanksError, match="rank 2 has not reached it; it has ended normally"):
        fail_in_step(RuntimeError("Timed out"), [0, 2])


def test_a_peer_that_has_died_is_left_to_the_monitor(monkeypatch):
    monkeypatch.setattr(current_world(), "monitor", _Monitor({0: {"gone": "has died"}}))
    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        fail_in_step(RuntimeError("Connection closed by peer"))
    assert not isinstance(caught.value, MissingRanksError)


def test_without_a_monitor_the_timeout_is_still_explained():
    timeout = RuntimeError("Timed out waiting 5000ms for recv operation to complete")
    with pytest.raises(MissingRanksError, match=r"`step` #1 timed out after .* s: some ranks of 1 did not") as caught:
        fail_in_step(timeout)
    assert caught.value.__cause__ is timeout


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            {0: at("step", 12, finished=False), 1: at("backward", 11, finished=True, step=11)},
            "rank 1 has not reached it; it last finished `backward` #11. Every rank must",
        ),
        (
            {0: at("step", 12, finished=False), 1: at("save", 1, finished=False, step=11)},
            "rank 1 has not reached it; it entered `save` #1.",
        ),
        (
            {0: at("step", 12, finished=False), 1: {"gone": "has ended normally"}},
            "rank 1 has not reached it; it has ended normally.",
        ),
        (
            {0: at("step", 12, finished=False), 1: {"gone": "does not answer"}, 2: at("step", 11, finished=True)},
            "ranks 1 and 2 have not reached it; rank 1 does not answer; rank 2 last finished `step` #11.",
        ),
        (
            {0: at("step", 12, finished=False), 1: {"counts": {}, "last": None, "finished": True}},
            "rank 1 has not reached it; it made no such call yet.",
        ),
        (
            {0: at("step", 12, finished=False), 1: at("step", 13, finished=False)},
            "although every rank has reached it",
        ),
    ],
)
def test_where_the_missing_ranks_are(records, words):
    assert words in describe_progress("`step` #12 timed out after 5 s", "step", 12, records)


def test_many_missing_ranks_are_counted():
    records = {rank: at("step", 11, finished=True) for rank in range(30)}
    text = describe_progress("`step` #12 timed out after 5 s", "step", 12, records)
    assert text.count("8, 9 and 20 others") == 2
    assert "last finished `step` #11" in text


def test_messages_survive_being_cut():
    data = encode({"type": "a", "text": "ä\n"}) + encode({"type": "b"})
    lines = Lines()
    messages = [message for byte in data for message in lines.feed(bytes([byte]))]
    assert messages == [{"type": "a", "text": "ä\n"}, {"type": "b"}]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\n", b"[1]\n", b"\xff\xfe\n"])
def test_strangers_are_noticed(data):
    with pytest.raises(ValueError, match=r"."):
        list(Lines().feed(data))
