import itertools

import pytest
import torch
from hypothesis import example, given
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
    axes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
)
@example(rows=8, axes=[(2, 2), (1, 4)])  # ranges that touch are joined, in the second of two halves as well
@example(rows=6, axes=[(2, 3), (3, 2)])
def test_ranks_hold_each_element_once_and_in_torchs_order(rows, axes):
    whole = torch.arange(rows)
    seen = []
    for coordinate in itertools.product(*(range(parts) for parts, _ in axes)):
        splits = [
            Split(dim=0, parts=parts, index=index, split_factor=factor)
            for (parts, factor), index in zip(axes, coordinate, strict=True)
        ]
        local = whole
        for split in splits:
            pieces = [piece.chunk(split.parts) for piece in local.chunk(split.split_factor)] if len(local) else []
            local = torch.cat([whole[:0], *(each[split.index] for each in pieces if split.index < len(each))])
        assert [box + place for box, place in local_boxes((rows,), splits)] == _runs(local.tolist())
        seen += local.tolist()
    assert sorted(seen) == whole.tolist()


def _runs(indices):
    """Return the ranges of consecutive indices, none of which touch, each with its place in the list."""
    starts = [place for place, index in enumerate(indices) if place == 0 or index != indices[place - 1] + 1]
    return [
        ((indices[start], indices[stop - 1] + 1), (start, stop))
        for start, stop in itertools.pairwise([*starts, len(indices)])
    ]
