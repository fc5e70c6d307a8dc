import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks

from booster_core.errors import ConfigError, MissingRanksError
from booster_core.ranks.calls import OBSERVERS, NamedCall, ObservedCall, observed_by
from booster_core.ranks.world import PROGRESS, current_world


@pytest.fixture(autouse=True)
def _fresh():
    PROGRESS.clear()
    yield
    PROGRESS.clear()


def test_a_context_notes_beginning_and_end():
    with NamedCall("step"):
        assert PROGRESS.record() == {
            "counts": {"step": 1},
            "last": ("step", 1),
            "finished": False,
            "call": ("step", 1),
            "ranks": None,
        }
        with NamedCall("reduction"):
            assert PROGRESS.call == ("step", 1)
        assert PROGRESS.call == ("step", 1)
    assert PROGRESS.is_finished
    assert PROGRESS.call is None


def test_the_ranks_of_the_outermost_call_are_noted():
    with NamedCall("forward", (2, 3)):
        with NamedCall("gather of parameters"):
            assert PROGRESS.record()["ranks"] == [2, 3]
        assert PROGRESS.record()["ranks"] == [2, 3]
    with NamedCall("step"):
        assert PROGRESS.record()["ranks"] is None


def fail_in_step(error, ranks=None):
    with NamedCall("step", ranks):
        raise error


@pytest.mark.parametrize("error", [ValueError("timed out"), RuntimeError("bad shape"), MissingRanksError("timed out")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as caught:
        fail_in_step(error)
    assert caught.value is error
    assert PROGRESS.call is None, "it is not waited in any more"


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


@pytest.mark.parametrize(
    "text",
    ["[gloo] Connection closed by peer [127.0.0.1]:1", "Rank 0 has ended, or its memory can't be read any more: x"],
)
def test_a_peer_that_has_ended_normally_is_named(monkeypatch, text):
    monkeypatch.setattr(current_world(), "monitor", _Monitor())
    with pytest.raises(MissingRanksError) as caught:
        fail_in_step(RuntimeError(text), [0, 1])
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


class _Diary:
    """Writes down what begins and ends."""

    def __init__(self):
        self.lines = []

    @contextlib.contextmanager
    def during(self, call):
        self.lines.append(f"begin {call.name}")
        try:
            yield
        except Exception as error:
            self.lines.append(f"{type(error).__name__} in {call.name}")
            raise
        self.lines.append(f"end {call.name}")


def test_an_observer_sees_the_calls_of_a_block():
    diary = _Diary()
    with NamedCall("before"), observed_by(diary):
        with NamedCall("step"), ObservedCall("all_reduce", payload_bytes=8):
            pass
        thread = threading.Thread(target=lambda: NamedCall("elsewhere").__enter__())
        thread.start()
        thread.join()
    with NamedCall("after"):
        pass
    assert diary.lines == [
        "begin step", "begin all_reduce", "end all_reduce", "end step", "begin elsewhere"
    ]  # fmt: skip
    assert not OBSERVERS


def test_an_observer_sees_what_a_call_raised():
    diary = _Diary()
    with pytest.raises(MissingRanksError), observed_by(diary):
        fail_in_step(RuntimeError("Timed out"))
    assert diary.lines == ["begin step", "RuntimeError in step"]
    assert not OBSERVERS


def test_calls_that_are_observed_alone_are_not_counted():
    with ObservedCall("all_reduce"):
        assert PROGRESS.record()["counts"] == {}


def _step():
    with NamedCall("step"):
        dist.all_reduce(torch.ones(1))


@on_ranks(2, group_timeout_seconds=1.5)
def test_a_collective_that_times_out_names_who_did_not_come():
    for index in range(3):
        with NamedCall("backward"):
            dist.all_reduce(torch.ones(1))
        if index < 2:
            _step()
    if dist.get_rank() == 1:
        time.sleep(4)
        return
    with pytest.raises(MissingRanksError) as caught:
        _step()
    assert str(caught.value).startswith("`step` #3 timed out after ")
    assert str(caught.value).endswith(
        " s: rank 1 has not reached it; it last finished `backward` #3. Every rank must make the same calls in the "
        "same order."
    )
    assert type(caught.value.__cause__) is RuntimeError


def _go_on(failing, error):
    """Go on after an error that some ranks raise in a call, or all of them where none does it by itself."""
    for number in range(2):
        try:
            with NamedCall("forward"):
                if number == 0 and dist.get_rank() in failing:
                    raise error
                if number == 0 and not failing:
                    dist.all_reduce(torch.ones(1))
        except type(error):
            pass
    total = torch.ones(1)
    _step()
    dist.all_reduce(total)
    assert total == 2


@pytest.mark.parametrize("failing", [(), (0, 1)])
@on_ranks(2, group_timeout_seconds=5.0)
def test_ranks_go_on_after_an_error_that_all_of_them_raise(failing):
    _go_on(failing, ValueError("bad"))


@on_ranks(2, group_timeout_seconds=5.0)
def test_an_error_of_booster_may_be_raised_before_anything_is_sent():
    _go_on((1,), ConfigError("bad"))


@on_ranks(2, group_timeout_seconds=1.5)
def test_a_rank_that_goes_on_after_an_error_alone_raises():
    match = "timed out"  # the other rank waits
    if dist.get_rank() == 1:
        match = (
            "^`forward` #1 has raised on this rank, but not on all of ranks 0 and 1, which wait for what it left out: "
            "ValueError: bad. Let the exception"
        )
    with pytest.raises(MissingRanksError, match=match):
        _go_on((1,), ValueError("bad"))
