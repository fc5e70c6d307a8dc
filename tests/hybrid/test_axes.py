from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from booster_core.errors import ConfigError
from booster_hybrid.mesh import MeshShape, make_axes, mesh_shape
from booster_testing import run_on_ranks

_SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: MeshShape(dict(zip(["dp", "pp", "sp", "tp"], sizes, strict=False)))
)


@given(_SHAPES)
def test_coordinates_are_row_major(shape):
    for rank in range(shape.world_size):
        assert [*shape.coordinates(rank).values()] == [*np.unravel_index(rank, [*shape.sizes.values()])]


@given(_SHAPES, st.sets(st.sampled_from(["dp", "pp", "sp", "tp"])))
def test_groups_partition_the_world_and_move_along_their_axes_alone(shape, axes):
    groups = shape.groups(sorted(axes))
    assert sorted(rank for group in groups for rank in group) == [*range(shape.world_size)]
    for group in groups:
        places = [shape.coordinates(rank) for rank in group]
        fixed = [{name: place[name] for name in place if name not in axes} for place in places]
        assert all(each == fixed[0] for each in fixed)
        assert group == sorted(group)


def test_the_innermost_axis_holds_neighbours():
    shape = MeshShape({"dp": 2, "pp": 2, "tp": 2})
    assert shape.groups(["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shape.groups(["dp"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.groups(["dp", "tp"]) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@settings(max_examples=20)
@given(st.sampled_from([1, 8, 64, 512, 4096]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 4]))
def test_an_axis_takes_what_is_left_of_thousands_of_ranks(world_size, tp_size, pp_size):
    if world_size % (tp_size * pp_size):
        with pytest.raises(ConfigError, match="does not divide the world size"):
            mesh_shape({"pp": pp_size, "tp": tp_size}, ("dp", "pp", "tp"), world_size)
        return
    shape = mesh_shape({"pp": pp_size, "tp": tp_size}, ("dp", "pp", "tp"), world_size)
    assert shape.world_size == world_size
    assert len(shape.groups(["dp"])) == tp_size * pp_size


def test_sizes_that_do_not_divide_the_world_are_named_with_those_that_would():
    with pytest.raises(
        ConfigError, match=r"`pp_size=1 \* tp_size=3` is 3, which does not divide the world size 8.*1, 2, 4, 8"
    ):
        mesh_shape({"tp": 3}, ("dp", "pp", "tp"), 8)


def test_a_size_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"`tp_size=0` must be at least 1"):
        MeshShape({"tp": 0})


def _axes():
    made = make_axes(MeshShape({"dp": 2, "tp": 2}), [("tp",), ("dp",), ("dp", "tp")])
    return {axes: (axis.ranks, axis.index, axis.group.size()) for axes, axis in made.items()}


def test_each_rank_gets_the_groups_it_is_in():
    of_ranks = run_on_ranks(_axes, 4)
    assert of_ranks[2] == {("tp",): ((2, 3), 0, 2), ("dp",): ((0, 2), 1, 2), ("dp", "tp"): ((0, 1, 2, 3), 2, 4)}


def _calls():
    calls = []
    make = dist.new_group
    dist.new_group = lambda ranks, **kwargs: calls.append(ranks) or make(ranks, **kwargs)
    try:
        made = make_axes(MeshShape({"dp": 2, "pp": 1, "tp": 2}), [("tp",), ("pp",), ("dp",), ("pp", "tp"), ()])
    finally:
        dist.new_group = make
    assert made["tp",] is made["pp", "tp"]
    assert made["pp",] is made[()]
    return calls


def test_a_rank_makes_only_the_groups_it_is_in():
    of_ranks = run_on_ranks(_calls, 4)
    assert of_ranks[2] == [[2, 3], [2], [0, 2]]
