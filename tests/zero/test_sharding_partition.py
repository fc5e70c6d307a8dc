import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from booster_zero.engine.partition import (
    ALIGNMENT,
    assign_owners,
    default_bucket_bytes,
    plan_flat,
    plan_whole,
)

sizes = st.lists(st.integers(0, 200), min_size=1, max_size=12).map(lambda numels: list(enumerate(numels)))
worlds = st.integers(1, 5)


def owned_once(plans, expected, world_size):
    """Assert that the ranks' pieces of each parameter cover it, in order and without overlap."""
    seen = {}
    for plan in plans:
        assert plan.bounds[0] == 0
        assert all(low <= high for low, high in pairwise(plan.bounds))
        assert len(plan.bounds) == world_size + 1
        assert plan.numel == sum(high - low for low, high in pairwise(plan.bounds))
        for slot in plan.slots:
            pieces = [plan.owned(slot, rank) for rank in range(world_size)]
            held = [piece for piece in pieces if piece is not None]
            assert held[0][0] == 0
            assert held[-1][1] == slot.numel
            assert all(before[1] == after[0] for before, after in pairwise(held))
            assert len(held) == 1 or all(start < stop for start, stop in held), "nobody owns a piece without elements"
            seen[slot.index] = slot.numel
    assert seen == dict(expected)


@given(sizes, worlds, st.integers(1, 300))
def test_flat_plans_cover_every_parameter_once(sizes, world_size, bucket_numel):
    plans = plan_flat(sizes, world_size, bucket_numel)
    owned_once(plans, sizes, world_size)
    for plan in plans:
        lengths = {high - low for low, high in pairwise(plan.bounds)}
        assert len(lengths) == 1, "slices are equal"
        assert all(bound % ALIGNMENT == 0 for bound in plan.bounds)
        assert plan.numel < sum(-(-slot.numel // ALIGNMENT) * ALIGNMENT for slot in plan.slots) + world_size * ALIGNMENT


@given(sizes, worlds, st.integers(1, 300))
def test_whole_plans_leave_every_parameter_to_one_rank(sizes, world_size, bucket_numel):
    owners = assign_owners(sizes, world_size)
    plans = plan_whole(sizes, owners, world_size, bucket_numel)
    owned_once(plans, sizes, world_size)
    for plan in plans:
        for slot in plan.slots:
            if slot.numel:
                assert plan.owned(slot, owners[slot.index]) == (0, slot.numel)


@given(sizes, worlds)
def test_slots_keep_their_order_and_do_not_overlap(sizes, world_size):
    for plan in plan_flat(sizes, world_size, 100):
        ends = [slot.offset + slot.numel for slot in plan.slots]
        assert all(end <= slot.offset for end, slot in zip(ends, plan.slots[1:], strict=False))
        assert all(slot.offset % ALIGNMENT == 0 for slot in plan.slots)


def test_owners_are_balanced():
    owners = assign_owners([(0, 100), (1, 60), (2, 50), (3, 40), (4, 0)], 2)
    loads = [sum(numel for index, numel in [(0, 100), (1, 60), (2, 50), (3, 40)] if owners[index] == r) for r in (0, 1)]
    assert sorted(loads) == [110, 140]


@given(sizes, worlds)
def test_owners_do_not_depend_on_the_order_in_which_parameters_are_listed(sizes, world_size):
    assert assign_owners(sizes[::-1], world_size) == assign_owners(sizes, world_size)


@given(st.lists(st.integers(1, 200), max_size=12), worlds)
def test_the_rank_that_owns_most_has_at_most_one_parameter_more_than_a_fair_share(numels, world_size):
    owners = assign_owners(list(enumerate(numels)), world_size)
    loads = [sum(numel for index, numel in enumerate(numels) if owners[index] == rank) for rank in range(world_size)]
    assert sum(loads) == sum(numels)
    assert max(loads) - min(loads) <= max(numels, default=0)


def test_the_smallest_parameters_fill_up_what_is_left():
    assert sorted(assign_owners([(0, 2), (1, 1), (2, 1)], 2).items()) == [(0, 0), (1, 1), (2, 1)]


def test_parameters_begin_at_cache_lines_in_fp32():
    assert ALIGNMENT * 4 == 64


def test_a_bucket_takes_no_parameter_beyond_its_size():
    plans = plan_flat([(0, 64), (1, 64), (2, 500), (3, 16)], 2, 128)
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[0, 1], [2], [3]]


def test_a_bucket_counts_the_elements_between_its_parameters():
    plans = plan_flat([(index, 1) for index in range(5)], 1, 2 * ALIGNMENT)
    assert [[slot.index for slot in plan.slots] for plan in plans] == [[0, 1], [2, 3], [4]]
    assert all(plan.numel <= 2 * ALIGNMENT for plan in plans)
    plans = plan_flat([(0, ALIGNMENT), (1, ALIGNMENT)], 1, 2 * ALIGNMENT)
    assert len(plans) == 1, "a bucket may be full"


def test_slices_are_no_longer_than_needed():
    for plan in plan_flat([(0, 3 * ALIGNMENT), (1, 5)], 2, 1000):
        assert tuple(plan.bounds) == (0, 2 * ALIGNMENT, 4 * ALIGNMENT)


def test_a_plan_for_many_ranks_is_as_small_as_one_for_two():
    plans = {size: plan_flat([(0, 100_000), (1, 7)], size, 1 << 20) for size in (2, 100_000)}
    held = {size: sum(sys.getsizeof(plan.bounds) for plan in each) for size, each in plans.items()}
    assert held[2] == held[100_000]


def test_empty_parameters_are_shared_out_too():
    assert sorted(assign_owners([(0, 0), (1, 0), (2, 0), (3, 0)], 2).values()) == [0, 0, 1, 1]


def test_an_empty_parameter_belongs_to_the_rank_where_it_would_begin():
    (plan,) = plan_flat([(0, ALIGNMENT), (1, 0), (2, ALIGNMENT), (3, 0)], 2, 1000)
    places = {slot.index: [plan.owned(slot, rank) for rank in range(2)] for slot in plan.slots}
    assert places[1] == places[3] == [None, (0, 0)]


@pytest.mark.parametrize(
    ("stage", "gradient_bytes", "expected"),
    [
        (2, 2**30, 25 * 2**20),
        (2, 48 * 2**20, 6 * 2**20),
        (2, 1000, 2**20),
        (1, 1000, 25 * 2**20),
    ],
)
def test_small_models_have_smaller_buckets_where_gradients_are_split(stage, gradient_bytes, expected):
    assert default_bucket_bytes(gradient_bytes, 1, stage=stage) == expected


@pytest.mark.parametrize(
    ("stage", "gradient_bytes", "shard_size", "expected"),
    [
        (1, 2**34, 100, 25 * 2**20),
        (1, 2**34, 1024, 256 * 2**20),
        (2, 2**34, 1024, 256 * 2**20),
        (1, 2**30, 1024, 128 * 2**20),
        (2, 2**30, 1024, 128 * 2**20),
        (1, 1000, 1024, 25 * 2**20),
        (2, 1000, 1024, 2**20),
    ],
)
def test_buckets_grow_with_the_number_of_ranks(stage, gradient_bytes, shard_size, expected):
    assert default_bucket_bytes(gradient_bytes, shard_size, stage=stage) == expected


def test_ranks_that_own_something_already_get_less():
    owners = assign_owners([(5, 4), (6, 3), (7, 3)], 3, [9, 0, 1])
    assert owners == {5: 1, 6: 2, 7: 1}
    assert assign_owners([(0, 1)], 2, [1, 0]) == {0: 1}
