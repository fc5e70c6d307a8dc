"""The order in which chunks are used, where it is another one than before."""

from booster_zero.engine.uses import Timeline


def recorded(timeline, kind, uses):
    timeline.begin(kind)
    for chunk in uses:
        timeline.note(chunk)
    timeline.end()


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
