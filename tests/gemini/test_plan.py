"""Plans of made-up steps: what is used is there, and moves come early."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from booster_core.errors import BudgetError
from booster_gemini.plan import Event, Placement

ROLE = "values"


def of(*names):
    """Return keys, as blocks have them, of one role."""
    return [(name, ROLE) for name in names]


def use(name, moment="", role=ROLE):
    return [Event((name, role), 1, moment), Event((name, role), -1, moment)]


def replay(plan, events, sizes, here, below):
    """Follow a plan as if moves took no time; return loads without a plan, the most bytes held, and what is left."""
    present, valued = set(here), set(here) | set(below)
    users, other, most, unplanned = dict.fromkeys(sizes, 0), 0, [], 0
    for event, moves in zip([*events, None], plan, strict=True):
        for key in moves.leave:
            assert key in present
            assert not users[key]
            present.discard(key)
        for key in moves.come:
            assert key in valued - present
            present.add(key)
        if event is None:
            break
        key, change, _ = event
        if key is None:
            other += change
        elif change == 0:
            present.discard(key)
            valued.discard(key)
        else:
            users[key] += change
            if change > 0:
                unplanned += key not in present and key in valued
                present.add(key)
                valued.add(key)
        most.append(sum(sizes[key] for key in present) + other)
    return unplanned, most, frozenset(present), frozenset(valued - present)


@st.composite
def steps(draw):
    sizes = {(name, ROLE): size for name, size in enumerate(draw(st.lists(st.integers(1, 50), min_size=1, max_size=6)))}
    events, users, taken = [], dict.fromkeys(sizes, 0), []
    for _ in range(draw(st.integers(1, 25))):
        key = draw(st.sampled_from(sorted(sizes)))
        kind = draw(st.sampled_from(["use", "release", "forget", "take", "give"]))
        if kind == "use" and sum(users.values()) < 3:
            users[key] += 1
            events.append(Event(key, 1, f"layer {key}"))
        elif kind == "release" and users[key]:
            users[key] -= 1
            events.append(Event(key, -1))
        elif kind == "forget" and not users[key]:
            events.append(Event(key, 0))
        elif kind == "take":
            taken.append(draw(st.integers(1, 40)))
            events.append(Event(None, taken[-1]))
        elif kind == "give" and taken:
            events.append(Event(None, -taken.pop()))
    events += [Event(key, -1) for key, count in users.items() for _ in range(count)]
    events += [Event(None, -size) for size in reversed(taken)]
    return events, sizes


def test_within_a_budget_each_block_comes_ahead_of_its_use():
    events = [event for name in "abcb" for event in use(name)]
    plan = Placement(budget_bytes=20, ahead={ROLE: 1}).plan(events, dict.fromkeys(of(*"abc"), 10), of("a"), of(*"bc"))
    assert [moves.come for moves in plan] == [of("a", "b"), [], of("c"), [], of("b"), [], [], [], []]
    assert not any(moves.leave for moves in plan)


def test_a_budget_below_the_working_set_names_the_least_and_the_module():
    a, b = of("a", "b")
    events = [
        *use("a", "forward of embed"),
        *(Event(key, 1, "forward of head") for key in (a, b)),
        Event(None, 5, "forward of head"),
        Event(None, -5),
        *(Event(key, -1) for key in (a, b)),
    ]
    sizes = {a: 10, b: 20}
    for budget in (0, 30):
        match = rf"`memory_budget_bytes={budget}`.*forward of head needs 35 bytes at once"
        with pytest.raises(BudgetError, match=match) as caught:
            Placement(budget_bytes=budget).plan(events, sizes, [a, b], [])
        assert caught.value.least_bytes == 35
    Placement(budget_bytes=35).plan(events, sizes, [a, b], [])


@settings(max_examples=200, deadline=None)
@given(steps(), st.floats(0, 1), st.integers(0, 4))
def test_fractions_bring_back_what_they_send_away(step, fraction, ahead):
    events, sizes = step
    placement = Placement(away={ROLE: fraction}, ahead={ROLE: ahead})
    below = frozenset(placement.leaving(sizes))
    here = frozenset(sizes) - below
    for _ in range(3):
        plan = placement.plan(events, sizes, here, below)
        unplanned, _, here, below = replay(plan, events, sizes, here, below)
        assert unplanned == 0


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_a_fraction_of_the_bytes_is_away(fraction):
    sizes = dict.fromkeys(of(*range(40)), 10)
    placement = Placement(away={ROLE: fraction}, ahead={ROLE: 2})
    away = placement.leaving(sizes)
    assert len(away) == 40 * fraction
    events = [event for name, _ in sizes for event in use(name)]
    _, most, here, _ = replay(placement.plan(events, sizes, sizes, []), events, sizes, sizes, [])
    assert sizes.keys() - here <= away
    if fraction == 1.0:
        assert most[-1] <= 3 * 10


def test_blocks_come_ahead_of_others_of_their_role():
    """However often those before are used in a row, and whatever else is."""
    sizes = {(number, role): 10 for number in range(6) for role in ("values", "state")}
    events = [event for number, role in sizes for _ in range(2) for event in use(number, role=role)]
    placement = Placement(away={"values": 1.0}, ahead={"values": 2})
    comes = {key: i for i, moves in enumerate(placement.plan(events, sizes, [], sizes)) for key in moves.come}
    first_use = {key: next(i for i, event in enumerate(events) if event.key == key) for key in sizes}
    for number in range(2, 6):
        assert comes[number, "values"] == first_use[number - 2, "values"]
        assert comes[number, "state"] == first_use[number, "state"]


@pytest.mark.parametrize(
    ("order", "here", "leave", "come"),
    [
        ("b+ b- a+ a-", "a", {0: "a", 2: "b", 4: "a"}, {0: "b", 2: "a"}),
        ("a+ a+ a- b+ b- a+ a- a-", "", {5: "b", 8: "a"}, {0: "a", 3: "b"}),
        ("a+ a- a+ a- b+ b-", "", {4: "a", 6: "b"}, {0: "a", 4: "b"}),
    ],
    ids=["idle at the start", "in use twice", "needed again at once"],
)
def test_a_block_that_is_away_leaves_when_its_last_use_ends(order, here, leave, come):
    a, b = of("a", "b")
    events = [Event((name, ROLE), 1 if sign == "+" else -1) for name, sign in order.split()]
    plan = Placement(away={ROLE: 1.0}).plan(events, {a: 10, b: 10}, of(*here), {a, b} - {*of(*here)})
    assert {index: moves.leave for index, moves in enumerate(plan) if moves.leave} == {
        k: of(v) for k, v in leave.items()
    }
    assert {index: moves.come for index, moves in enumerate(plan) if moves.come} == {k: of(v) for k, v in come.items()}
