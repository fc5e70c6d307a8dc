"""The groups of ranks in which experts communicate, by arithmetic, under every order of the axes."""

from __future__ import annotations

import itertools

import pytest

from booster_core.errors import ConfigError
from booster_hybrid.mesh import AXES, mesh_shape, with_experts

ORDERS = list(itertools.permutations(AXES))
SIZES = [(4, {}, 2), (4, {}, 4), (8, {"tp": 2}, 2), (48, {"pp": 2, "sp": 3, "tp": 2}, 2)]


@pytest.mark.parametrize(("order", "case"), [*itertools.product(ORDERS, SIZES)])
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
