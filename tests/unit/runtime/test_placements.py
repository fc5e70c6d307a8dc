from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_runtime.sharding.placements import Split, local_boxes


def held(shape, splits):
    return list(local_boxes(shape, splits))


def test_an_uncut_tensor_is_one_box():
    assert held((3, 2), []) == [(((0, 3), (0, 2)), ((0, 3), (0, 2)))]


def test_a_scalar_is_one_box_without_ranges():
    assert held((), []) == [((), ())]


@pytest.mark.parametrize(("index", "rows"), [(0, (0, 2)), (1, (2, 4)), (2, (4, 5))])
def test_uneven_rows_go_to_the_first_ranks(index, rows):
    assert held((5, 3), [Split(dim=0, parts=3, index=index)]) == [
        ((rows, (0, 3)), ((0, rows[1] - rows[0]), (0, 3))),
    ]


def test_a_rank_may_hold_nothing():
    assert held((2, 3), [Split(dim=0, parts=4, index=3)]) == []
    assert held((0, 3), []) == []


def test_a_dimension_that_is_cut_twice_is_cut_within():
    assert held((8,), [Split(dim=0, parts=2, index=1), Split(dim=0, parts=2, index=1)]) == [(((6, 8),), ((0, 2),))]


def test_a_cut_outside_of_an_earlier_one_leaves_a_piece_of_each_half():
    # Axis 0 cuts within what axis 1 has cut: alone, axis 0's cut leaves a part of each half.
    assert held((8,), [Split(dim=0, parts=2, index=1, split_factor=2)]) == [
        (((2, 4),), ((0, 2),)),
        (((6, 8),), ((2, 4),)),
    ]


@given(
    rows=st.integers(0, 13),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    factor=st.integers(1, 3),
)
def test_ranks_hold_each_element_once_and_in_torchs_order(rows, sizes, factor):
    whole = torch.arange(rows)
    seen = []
    for coordinate in itertools.product(*(range(size) for size in sizes)):
        splits = [Split(dim=0, parts=size, index=index) for size, index in zip(sizes, coordinate, strict=True)]
        splits[0] = Split(dim=0, parts=sizes[0], index=coordinate[0], split_factor=factor)
        expected = [chunk.chunk(sizes[0]) for chunk in whole.chunk(factor)] if rows else []
        local = torch.cat([whole[:0], *(c[coordinate[0]] for c in expected if coordinate[0] < len(c))])
        for size, index in list(zip(sizes, coordinate, strict=True))[1:]:
            chunks = local.chunk(size) if len(local) else ()
            local = chunks[index] if index < len(chunks) else local[:0]
        found = list(local_boxes((rows,), splits))
        got = torch.cat([whole[:0], *(whole[low:high] for (((low, high),), _) in found)])
        assert got.tolist() == local.tolist()
        assert [place for _, (place,) in found] == _consecutive([box[0] for box, _ in found])
        seen += got.tolist()
    assert sorted(seen) == whole.tolist()


def _consecutive(ranges):
    ends = list(itertools.accumulate(high - low for low, high in ranges))
    return [(end - (high - low), end) for end, (low, high) in zip(ends, ranges, strict=True)]
