from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.schedule import COSTS, Action, ActionKind, Event, Placement, Schedule, make_schedule

_STYLES = st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)])


@settings(max_examples=60, deadline=None)
@given(_STYLES, st.integers(1, 6), st.integers(1, 14))
def test_every_microbatch_passes_every_stage_once(style, num_ranks, num_microbatches):
    """In their order, so that the last microbatch's gradient is the last to reach each parameter."""
    schedule = make_schedule(style[0], num_ranks, num_microbatches, style[1])
    kinds = [ActionKind.FORWARD, ActionKind.BACKWARD]
    if style[0] == "zbv":
        kinds = [ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
    for rank in range(num_ranks):
        expected = {
            Action(kind, stage, microbatch)
            for kind in kinds
            for stage in schedule.placement.stages_of(rank)
            for microbatch in range(num_microbatches)
        }
        actions = schedule.actions(rank)
        assert len(actions) == len(expected)
        assert set(actions) == expected
        for kind, stage in itertools.product(kinds, schedule.placement.stages_of(rank)):
            order = [each.microbatch for each in actions if (each.work, each.stage) == (kind, stage)]
            assert order == sorted(order)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 14))
def test_the_v_keeps_no_more_than_1f1b_s_first_rank(num_ranks, num_microbatches):
    schedule = make_schedule("zbv", num_ranks, num_microbatches, 2)
    # Its chunks are half as large as the stages of 1F1B, whose first rank keeps `num_ranks`.
    assert max(schedule.peak_live(rank) for rank in range(num_ranks)) <= 2 * num_ranks


@pytest.mark.parametrize("style", ["gpipe", "1f1b"])
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 24))
def test_the_idle_share_matches_its_formula(style, num_ranks, num_microbatches):
    schedule = make_schedule(style, num_ranks, num_microbatches)
    expected = (num_ranks - 1) / (num_microbatches + num_ranks - 1)
    assert [schedule.idle_share(rank) for rank in range(num_ranks)] == pytest.approx([expected] * num_ranks)


@settings(max_examples=60, deadline=None)
@given(_STYLES, st.integers(1, 6), st.integers(1, 14))
def test_the_times_of_the_plan_hold_if_ranks_do_nothing_before_its_turn(style, num_ranks, num_microbatches):
    """A clock that knows dependencies and lists alone comes to the end, to the same times, and to no overlap."""
    schedule = make_schedule(style[0], num_ranks, num_microbatches, style[1])
    last = schedule.placement.num_stages - 1
    left = [list(schedule.actions(rank)) for rank in range(num_ranks)]
    stops: dict[Action, int] = {}
    events: list[list[Event]] = [[] for _ in left]
    while any(left):
        waiting = sum(map(len, left))
        for mine, done in zip(left, events, strict=True):
            while mine and all(need in stops for need in _needs(mine[0], last)):
                action = mine.pop(0)
                start = max([done[-1].stop if done else 0, *(stops[need] for need in _needs(action, last))])
                stops[action] = start + COSTS[action.work]
                done.append(Event(action, start, stops[action]))
        assert sum(map(len, left)) < waiting, [mine[:1] for mine in left]
    assert schedule.events == events
    assert schedule.duration == max(stops.values())


def test_plans_of_many_microbatches_are_made_once():
    assert make_schedule("zbv", 8, 64, 2) is make_schedule("zbv", 8, 64, 2)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_zero_bubble_v_waits_for_the_first_microbatch_alone(num_ranks, num_microbatches):
    schedule = make_schedule("zbv", num_ranks, num_microbatches, 2)
    assert schedule.duration == 6 * num_microbatches + num_ranks - 1


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 8), (8, 16), (8, 32), (12, 24)])
def test_the_zero_bubble_v_idles_a_third_of_1f1b_s_time_at_most(num_ranks, num_microbatches):
    schedule = make_schedule("zbv", num_ranks, num_microbatches, 2)
    assert schedule.idle_share(0) <= make_schedule("1f1b", num_ranks, num_microbatches).idle_share(0) / 3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 14))
def test_gpipe_does_all_forwards_before_all_backwards(num_ranks, num_microbatches):
    schedule = make_schedule("gpipe", num_ranks, num_microbatches)
    for rank in range(num_ranks):
        assert schedule.actions(rank) == [
            Action(work, rank, each)
            for work in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for each in range(num_microbatches)
        ]
        assert schedule.peak_live(rank) == num_microbatches


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 14))
def test_1f1b_takes_turns_after_a_forward_for_each_stage_that_follows(num_ranks, num_microbatches):
    schedule = make_schedule("1f1b", num_ranks, num_microbatches)
    for rank in range(num_ranks):
        warm_up = num_ranks - rank - 1
        assert schedule.actions(rank) == _in_turns(
            [Action(ActionKind.FORWARD, rank, each) for each in range(num_microbatches)],
            [Action(ActionKind.BACKWARD, rank, each) for each in range(num_microbatches)],
            warm_up,
        )


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 3), st.integers(1, 5), st.integers(1, 14))
def test_interleaved_chunks_take_turns_in_the_order_of_the_paper(num_chunks, num_ranks, num_microbatches):
    """Narayanan et al. 2021, section 2.2: groups of as many microbatches as ranks pass one chunk after the other."""
    schedule = make_schedule("interleaved", num_ranks, num_microbatches, num_chunks)
    for rank in range(num_ranks):
        forwards, backwards = [], []
        for first in range(0, num_microbatches, num_ranks):
            for chunk in range(num_chunks):
                for each in range(first, first + num_ranks):
                    forwards.append(Action(ActionKind.FORWARD, chunk * num_ranks + rank, each))
                    backwards.append(Action(ActionKind.BACKWARD, (num_chunks - 1 - chunk) * num_ranks + rank, each))
        warm_up = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks
        actions = _in_turns(forwards, backwards, warm_up)
        assert schedule.actions(rank) == [each for each in actions if each.microbatch < num_microbatches]


def _in_turns(forwards, backwards, warm_up):
    """Return some forwards, then forward and backward by turns, then the backwards that are left."""
    actions = forwards[:warm_up]
    for forward, backward in itertools.zip_longest(forwards[warm_up:], backwards):
        actions += [each for each in (forward, backward) if each is not None]
    return actions


def test_the_peak_may_come_after_backwards():
    works = [
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.FORWARD,
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.BACKWARD,
    ]
    events = [Event(Action(work, 0, 0), time, time + 1) for time, work in enumerate(works)]
    assert Schedule(Placement(1), 3, [events]).peak_live(0) == 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_v_alone_splits_backward(num_ranks):
    styles = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}
    found = {style: make_schedule(style, num_ranks, 2, num_chunks).is_split for style, num_chunks in styles.items()}
    assert found == {"gpipe": False, "1f1b": False, "interleaved": False, "zbv": True}


def test_zero_bubble_places_stages_in_a_v():
    assert [Placement(4).stages_of(rank) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [Placement(4, 2, is_v=True).stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [Placement(2, 3, is_v=True).stages_of(rank) for rank in range(2)] == [[0, 3, 4], [1, 2, 5]]
    assert [Placement(2, 2).stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("style", "num_chunks", "message"),
    [
        ("fifo", 1, r"`pp_style='fifo'` is not one of 'gpipe'"),
        ("gpipe", 2, r"'gpipe'` puts 1 stage\(s\) on each rank, but `num_model_chunks=2`"),
        ("1f1b", 0, r"'1f1b'` puts 1 stage\(s\) on each rank, but `num_model_chunks=0`"),
        ("interleaved", 1, r"at least 2 stage\(s\) on each rank, but `num_model_chunks=1`"),
        ("zbv", 1, r"puts 2 stage\(s\) on each rank"),
        ("zbv", 3, r"puts 2 stage\(s\) on each rank"),
        ("dualpipev", 2, r"`pp_style='dualpipev'` is not one of 'gpipe', '1f1b', 'interleaved', 'zbv'"),
    ],
)
def test_a_style_says_how_many_chunks_it_takes(style, num_chunks, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(style, 2, 4, num_chunks)


def _needs(action: Action, last: int) -> set[Action]:
    """State the dependencies independently, from the definition of a pipeline."""
    work, stage, microbatch = action.work, action.stage, action.microbatch
    if work is ActionKind.FORWARD:
        return {Action(ActionKind.FORWARD, stage - 1, microbatch)} if stage else set()
    if work is ActionKind.BACKWARD_WEIGHT:
        return {Action(ActionKind.BACKWARD_INPUT, stage, microbatch)}
    after = {Action(work, stage + 1, microbatch)} if stage < last else set()
    return after | {Action(ActionKind.FORWARD, stage, microbatch)}
