"""Placement policies on made-up steps: budgets hold at every event, what is used is there, and moves come early."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from booster_core.errors import BudgetError
from booster_gemini.placement.auto import AutoPlacement
from booster_gemini.placement.policy import Event, Kind, Request, largest_working_set
from booster_gemini.placement.static import StaticPlacement


def use(key, moment=""):
    return [Event(Kind.USE, key, 0, moment), Event(Kind.RELEASE, key, 0, moment)]


def replay(request, plan):
    """Follow a plan as if moves took no time; return loads without a plan, the most bytes held, and what is left."""
    present, valued = set(request.resident), set(request.resident | request.away)
    users, reserved, most, unplanned = {}, 0, [], 0
    for event, moves in zip([*request.events, None], plan, strict=True):
        for key in moves.evict:
            assert key in present
            assert not users.get(key)
            present.discard(key)
        for key in moves.load:
            assert key in valued - present
            present.add(key)
        if event is None:
            break
        key = event.key
        if event.kind is Kind.USE:
            users[key] = users.get(key, 0) + 1
            unplanned += key not in present and key in valued
            present.add(key)
            valued.add(key)
        elif event.kind is Kind.RELEASE:
            users[key] -= 1
        elif event.kind is Kind.FORGET:
            present.discard(key)
            valued.discard(key)
        else:
            reserved += event.num_bytes if event.kind is Kind.RESERVE else -event.num_bytes
        most.append(sum(request.sizes[key] for key in present) + reserved)
    return unplanned, most, frozenset(present), frozenset(valued - present)


@st.composite
def steps(draw):
    sizes = dict(enumerate(draw(st.lists(st.integers(1, 50), min_size=1, max_size=6))))
    events, users, reserved, valued = [], dict.fromkeys(sizes, 0), [], set()
    for _ in range(draw(st.integers(1, 25))):
        key = draw(st.sampled_from(sorted(sizes)))
        kind = draw(st.sampled_from(list(Kind)))
        if kind is Kind.USE and sum(users.values()) < 3:
            users[key] += 1
            valued.add(key)
            events.append(Event(kind, key, 0, f"layer {key}"))
        elif kind is Kind.RELEASE and users[key]:
            users[key] -= 1
            events.append(Event(kind, key))
        elif kind is Kind.FORGET and not users[key]:
            events.append(Event(kind, key))
        elif kind is Kind.RESERVE:
            reserved.append(draw(st.integers(1, 40)))
            events.append(Event(kind, None, reserved[-1]))
        elif kind is Kind.FREE and reserved:
            events.append(Event(kind, None, reserved.pop()))
    events += [Event(Kind.RELEASE, key) for key, count in users.items() for _ in range(count)]
    events += [Event(Kind.FREE, None, size) for size in reversed(reserved)]
    return events, sizes


@settings(max_examples=300, deadline=None)
@given(steps(), st.integers(0, 120), st.data())
def test_auto_keeps_its_budget_at_every_event_and_misses_nothing(step, spare, data):
    events, sizes = step
    budget = largest_working_set(events, sizes).num_bytes + spare
    resident, room = set(), budget
    for key, size in sizes.items():
        if size <= room and data.draw(st.booleans()):
            resident.add(key)
            room -= size
    away = frozenset(sizes) - resident
    for _ in range(3):
        request = Request(
            events=events,
            sizes=sizes,
            resident=frozenset(resident),
            away=away,
            budget_bytes=[budget] * len(events),
        )
        unplanned, most, resident, away = replay(request, AutoPlacement().plan(request))
        assert max(most, default=0) <= budget
        assert unplanned == 0


def demand_loads(sequence, sizes, budget, resident, choose):
    """Count loads of a cache that fetches on demand, for the second of two rounds."""
    present, loads = set(resident), 0
    rounds = list(sequence) * 3
    for index, key in enumerate(rounds):
        if key in present:
            continue
        loads += index >= len(sequence)
        while sum(sizes[each] for each in present) + sizes[key] > budget:
            present.discard(choose(present, rounds, index))
        present.add(key)
    return loads


def test_auto_moves_less_than_least_recently_used_on_a_loop():
    sizes = dict.fromkeys(range(10), 1)
    sequence = [*range(10), *reversed(range(10))]
    events = [event for key in sequence for event in use(key)]

    def least_recent(present, rounds, index):
        return min(present, key=lambda key: max((i for i in range(index) if rounds[i] == key), default=-1))

    resident, away, loads = frozenset(range(4)), frozenset(range(4, 10)), []
    for _ in range(3):
        request = Request(events=events, sizes=sizes, resident=resident, away=away, budget_bytes=[4] * len(events))
        plan = AutoPlacement().plan(request)
        loads.append(sum(len(moves.load) for moves in plan))
        _, _, resident, away = replay(request, plan)
    # Forth and back over ten with room for four: each way six have to come.
    assert loads[-1] == 12
    assert 2 * loads[-1] <= demand_loads(sequence, sizes, 4, range(4), least_recent) <= 2 * len(sequence)


def test_auto_loads_before_the_use_as_soon_as_there_is_room():
    events = [event for key in "abcb" for event in use(key)]
    sizes = dict.fromkeys("abc", 10)
    request = Request(
        events=events, sizes=sizes, resident=frozenset("ab"), away=frozenset("c"), budget_bytes=[20] * len(events)
    )
    plan = AutoPlacement().plan(request)
    # "a" is over after event 1: it leaves there, and "c" comes while "b" is used.
    assert plan[2].evict == ("a",)
    assert plan[2].load == ("c",)


def test_auto_with_room_for_everything_moves_nothing():
    events = [event for key in "abcabc" for event in use(key)]
    sizes = dict.fromkeys("abc", 10)
    request = Request(events=events, sizes=sizes, resident=frozenset("abc"), budget_bytes=[30] * len(events))
    assert not any(moves.evict or moves.load for moves in AutoPlacement().plan(request))


def test_a_budget_below_the_working_set_names_the_least_and_the_module():
    events = [
        *use("a", "forward of embed"),
        Event(Kind.USE, "a", 0, "forward of head"),
        Event(Kind.USE, "b", 0, "forward of head"),
        Event(Kind.RESERVE, None, 5, "forward of head"),
        Event(Kind.FREE, None, 5),
        Event(Kind.RELEASE, "a"),
        Event(Kind.RELEASE, "b"),
    ]
    request = Request(
        events=events, sizes={"a": 10, "b": 20}, resident=frozenset("ab"), budget_bytes=[30] * len(events)
    )
    with pytest.raises(BudgetError, match=r"`memory_budget_bytes=30`.*forward of head needs 35 bytes at once") as info:
        AutoPlacement().plan(request)
    assert info.value.least_bytes == 35
    enough = Request(events=events, sizes=request.sizes, resident=frozenset("ab"), budget_bytes=[35] * len(events))
    AutoPlacement().plan(enough)


@settings(max_examples=200, deadline=None)
@given(steps(), st.floats(0, 1), st.integers(0, 4))
def test_static_brings_back_what_it_sends_away(step, fraction, ahead):
    events, sizes = step
    policy = StaticPlacement({"all": fraction}, class_of=lambda key: "all", ahead={"all": ahead})
    resident, away = frozenset(key for key in sizes if policy.may_stay(key, sizes)), frozenset()
    away = frozenset(sizes) - resident
    for _ in range(3):
        request = Request(events=events, sizes=sizes, resident=resident, away=away)
        unplanned, _, resident, away = replay(request, policy.plan(request))
        assert unplanned == 0


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_static_keeps_its_fraction_of_bytes_away(fraction):
    sizes = dict.fromkeys(range(40), 10)
    policy = StaticPlacement({"all": fraction}, class_of=lambda key: "all", ahead={"all": 2})
    away = [key for key in sizes if not policy.may_stay(key, sizes)]
    assert len(away) == 40 * fraction
    events = [event for key in sizes for event in use(key)]
    request = Request(events=events, sizes=sizes, resident=frozenset(sizes))
    _, most, resident, _ = replay(request, policy.plan(request))
    assert set(sizes) - resident <= set(away)
    if fraction == 1.0:
        assert most[-1] <= 3 * 10


def test_static_fetches_blocks_ahead_of_others_of_their_class():
    """However often those before are used in a row, and whatever else is."""
    sizes = {(kind, number): 10 for number in range(6) for kind in ("values", "state")}
    events = [event for key in sizes for _ in range(2) for event in use(key)]
    fractions = {"values": 1.0, "state": 0.0}
    policy = StaticPlacement(fractions, class_of=lambda key: key[0], ahead={"values": 2})
    request = Request(events=events, sizes=sizes, resident=frozenset(), away=frozenset(sizes))
    fetched = {key: index for index, moves in enumerate(policy.plan(request)) for key in moves.load}
    first_use = {key: next(i for i, event in enumerate(events) if event.key == key) for key in sizes}
    for number in range(2, 6):
        assert fetched["values", number] == first_use["values", number - 2]
        assert fetched["state", number] == first_use["state", number]
