"""The groups of ranks that the plugin communicates in, by arithmetic, under every order of the axes, and on ranks."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranked import on_ranks

from booster_core.errors import ConfigError
from booster_hybrid.mesh import AXES, COMMUNICATING, MeshShape, make_axes, mesh_shape, with_experts

ORDERS = list(itertools.permutations(AXES))
SIZES = [(1, {}), (6, {"tp": 3}), (24, {"pp": 2, "sp": 3, "tp": 2}), (512, {"pp": 4, "sp": 2, "tp": 8})]
LARGE = [(4096, {"pp": 16, "sp": 2, "tp": 8})]
CASES = [*itertools.product(ORDERS, SIZES), *itertools.product(ORDERS[::12], LARGE)]


@pytest.mark.parametrize(("order", "case"), CASES)
def test_every_group_is_right_under_every_order(order, case):
    world_size, sizes = case
    shape = mesh_shape(sizes, order, world_size)
    assert tuple(shape.sizes) == order
    assert {name: shape.sizes[name] for name in sizes} == sizes
    places = [shape.coordinates(rank) for rank in range(world_size)]
    assert len({tuple(sorted(place.items())) for place in places}) == world_size
    for axes in COMMUNICATING:
        # Who is in a group, said without the mesh: those who differ along its axes only.
        expected = {}
        for rank, place in enumerate(places):
            expected.setdefault(tuple(place[name] for name in AXES if name not in axes), []).append(rank)
        groups = shape.groups(axes)
        # Ascending, as torch numbers the ranks of a group whatever order they are listed in.
        assert sorted(groups) == sorted(expected.values())
        if len(axes) == 1:
            for ranks in groups:  # so that an index in the group is the coordinate
                assert [places[rank][axes[0]] for rank in ranks] == [*range(shape.sizes[axes[0]])]


EXPERT_SIZES = [(4, {}, 2), (4, {}, 4), (8, {"tp": 2}, 2), (48, {"pp": 2, "sp": 3, "tp": 2}, 2)]


@pytest.mark.parametrize(("order", "case"), [*itertools.product(ORDERS, EXPERT_SIZES)])
def test_experts_are_spread_over_neighbours_of_the_data_parallel_axis(order, case):
    world_size, sizes, ep_size = case
    shape = mesh_shape(sizes, order, world_size)
    split = with_experts(shape, ep_size)
    for rank in range(world_size):
        before, after = shape.coordinates(rank), split.coordinates(rank)
        assert before == {**{name: after[name] for name in AXES if name != "dp"}, "dp": before["dp"]}
        assert (after["edp"], after["ep"]) == divmod(before["dp"], ep_size)
    for spread in split.groups(("ep",)):
        for alike in split.groups(("edp", "sp")):
            assert len(set(spread) & set(alike)) <= 1
    # Those that reduce gradients of experts, and those that have the others, are together those that reduce the rest.
    for reducing in shape.groups(("dp", "sp")):
        inside = [ranks for ranks in split.groups(("edp", "sp")) if set(ranks) <= set(reducing)]
        assert sorted(rank for ranks in inside for rank in ranks) == reducing
        assert len(inside) == ep_size


def test_a_size_that_does_not_divide_the_data_parallel_size_is_named():
    message = r"`ep_size=4` does not divide the data parallel size 6, .* 12 ranks. Use one of 1, 2, 3, 6"
    with pytest.raises(ConfigError, match=message):
        with_experts(mesh_shape({"tp": 2}, AXES, 12), 4)


_SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: MeshShape(dict(zip(["dp", "pp", "sp", "tp"], sizes, strict=False)))
)


@given(_SHAPES)
def test_coordinates_are_row_major(shape):
    for rank in range(shape.world_size):
        assert [*shape.coordinates(rank).values()] == [*np.unravel_index(rank, [*shape.sizes.values()])]


def test_sizes_that_do_not_divide_the_world_are_named_with_those_that_would():
    with pytest.raises(
        ConfigError, match=r"`pp_size=1 \* tp_size=3` is 3, which does not divide the world size 8.*1, 2, 4, 8"
    ):
        mesh_shape({"tp": 3}, ("dp", "pp", "tp"), 8)


@on_ranks(4)
def test_a_rank_makes_only_the_groups_it_is_in():
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        made = make_axes(
            MeshShape({"dp": 2, "pp": 1, "tp": 2}), [("tp",), ("pp",), ("dp",), ("dp", "tp"), ("pp", "tp"), ()]
        )
    assert made["tp",] is made["pp", "tp"]
    assert made["pp",] is made[()]
    if dist.get_rank() == 2:
        found = {axes: (axis.ranks, axis.index, axis.group.size()) for axes, axis in made.items()}
        assert (found["tp",], found["dp",]) == (((2, 3), 0, 2), ((0, 2), 1, 2))
        assert found["dp", "tp"] == ((0, 1, 2, 3), 2, 4)
        assert [call.args[0] for call in new_group.call_args_list] == [[2, 3], [2], [0, 2], [0, 1, 2, 3]]
