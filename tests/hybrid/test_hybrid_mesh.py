"""The groups of ranks that the plugin communicates in, by arithmetic, under every order of the axes."""

from __future__ import annotations

import itertools

import pytest

from booster_core.errors import ConfigError
from booster_hybrid.config import HybridConfig
from booster_hybrid.mesh import AXES, COMMUNICATING, check_order, mesh_shape

ORDERS = list(itertools.permutations(AXES))
SIZES = [(1, {}), (6, {"tp": 3}), (24, {"pp": 2, "sp": 3, "tp": 2}), (512, {"pp": 4, "sp": 2, "tp": 8})]
LARGE = [(4096, {"pp": 16, "sp": 2, "tp": 8}), (4096, {"pp": 1, "sp": 1, "tp": 1})]
CASES = [*itertools.product(ORDERS, SIZES), *itertools.product(ORDERS[::5], LARGE)]


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


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_ranks_of_the_innermost_axis_are_neighbours(order):
    shape = mesh_shape({"pp": 2, "sp": 2, "tp": 2}, order, 16)
    assert shape.groups(order[-1:]) == [[rank, rank + 1] for rank in range(0, 16, 2)]


@pytest.mark.parametrize("order", ORDERS[::5], ids="-".join)
def test_the_data_and_replica_groups_intersect_in_one_rank(order):
    """What reduces gradients crosses each replica once, so that nothing is counted twice or left out."""
    shape = mesh_shape({"pp": 2, "sp": 3, "tp": 2}, order, 24)
    for reducing in shape.groups(("dp", "sp")):
        for parts in shape.groups(("pp", "tp")):
            assert len(set(reducing) & set(parts)) == 1


def test_sizes_that_do_not_divide_the_world_are_named():
    message = r"`pp_size=2 \* sp_size=1 \* tp_size=3` is 6, which does not divide the world size 8.*one of 1, 2, 4, 8"
    with pytest.raises(ConfigError, match=message):
        mesh_shape({"pp": 2, "tp": 3}, AXES, 8)


def test_the_config_checks_the_order():
    with pytest.raises(ConfigError, match="must name each of 'dp', 'pp', 'sp', 'tp' once"):
        HybridConfig(mesh_order=("pp", "dp"))
    assert check_order(["tp", "sp", "pp", "dp"]) == ("tp", "sp", "pp", "dp")
