from __future__ import annotations

import pytest

from booster_core.errors import MissingRanksError
from booster_core.ranks.rendezvous import PROGRESS, Progress, naming_missing_ranks
from booster_core.ranks.world import current_world


@pytest.fixture(autouse=True)
def _fresh():
    PROGRESS.clear()
    yield
    PROGRESS.clear()


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
    """Answers what it was asked."""

    def __init__(self, *, has_ended=True):
        self._has_ended = has_ended

    def describe_missing(self, *asked, only_ended=False):
        if only_ended:
            return f"ended before {asked}" if self._has_ended else None
        return f"missing in {asked}"


@pytest.mark.parametrize("ranks", [None, (0, 2)])
def test_a_timeout_is_explained_by_the_monitor(monkeypatch, ranks):
    monkeypatch.setattr(current_world(), "monitor", _Monitor())
    with pytest.raises(MissingRanksError) as caught:
        fail_in_step(RuntimeError("Timed out"), ranks)
    assert str(caught.value).startswith("`step` #1 timed out after ")
    assert str(caught.value).endswith(f" s: missing in ('step', 1, {ranks})")


def test_a_peer_that_has_ended_normally_is_named(monkeypatch):
    monkeypatch.setattr(current_world(), "monitor", _Monitor())
    with pytest.raises(MissingRanksError) as caught:
        fail_in_step(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), [0, 1])
    assert str(caught.value) == "ended before ('step', 1, [0, 1])"


def test_a_peer_that_has_died_is_left_to_the_monitor(monkeypatch):
    monkeypatch.setattr(current_world(), "monitor", _Monitor(has_ended=False))
    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        fail_in_step(RuntimeError("Connection closed by peer"))
    assert not isinstance(caught.value, MissingRanksError)


def test_without_a_monitor_the_timeout_is_still_explained():
    timeout = RuntimeError("Timed out waiting 5000ms for recv operation to complete")
    with pytest.raises(MissingRanksError, match=r"`step` #1 timed out after .* s: some ranks of 1 did not") as caught:
        fail_in_step(timeout)
    assert caught.value.__cause__ is timeout
