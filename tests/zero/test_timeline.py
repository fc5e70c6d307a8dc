"""The order in which chunks are used: recorded in a phase, and expected in the next of its kind."""

from __future__ import annotations

from booster_zero.engine.uses import Timeline


def recorded(timeline, kind, uses):
    timeline.begin(kind)
    for chunk in uses:
        timeline.note(chunk)
    timeline.end()


def test_what_came_after_a_use_is_expected_after_it_again():
    timeline = Timeline()
    recorded(timeline, "forward", [0, 1, 1, 2, 1])
    timeline.begin("forward")
    assert timeline.upcoming(2) == [0, 1]
    timeline.note(0)
    assert timeline.upcoming(3) == [1, 2]  # each once


def test_kinds_are_told_apart():
    timeline = Timeline()
    recorded(timeline, "forward", [0, 1])
    recorded(timeline, "backward", [1, 0])
    timeline.begin("backward")
    assert timeline.upcoming(1) == [1]
    timeline.begin("evaluation")
    assert timeline.upcoming(1) == []


def test_another_branch_is_expected_the_next_time():
    timeline = Timeline()
    recorded(timeline, "forward", [0, 1, 3])
    timeline.begin("forward")
    timeline.note(0)
    timeline.note(2)  # a branch that was not taken before
    assert timeline.upcoming(2) == [1, 3]
    timeline.note(3)
    assert timeline.upcoming(2) == []
    timeline.begin("forward")
    assert timeline.upcoming(3) == [0, 2, 3]


def test_nothing_is_expected_of_chunks_that_are_gone():
    timeline = Timeline()
    recorded(timeline, "forward", [0, 1])
    timeline.forget()
    timeline.begin("forward")
    assert timeline.upcoming(2) == []
