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


def test_the_config_checks_the_order():
    with pytest.raises(ConfigError, match="must name each of 'dp', 'pp', 'sp', 'tp' once"):
        HybridConfig(mesh_order=("pp", "dp"))
    assert check_order(["tp", "sp", "pp", "dp"]) == ("tp", "sp", "pp", "dp")
