"""Which indices of a dimension each tensor parallel rank holds: every one is somewhere, and one rank alone owns it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_core.errors import ConfigError
from booster_hybrid.tensor_parallel.split import (
    Block,
    Split,
    cut_groups,
    cut_units,
    is_repeated,
    split_dimension,
)


@given(st.integers(0, 40), st.integers(1, 9))
def test_units_are_cut_as_evenly_as_can_be(num_units, size):
    cuts = cut_units(num_units, size)
    assert [unit for start, stop in cuts for unit in range(start, stop)] == list(range(num_units))
    lengths = [stop - start for start, stop in cuts]
    assert len(lengths) == size
    assert lengths == sorted(lengths, reverse=True), "the first have more"
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_groups_stay_whole_or_are_shared_by_ranks_of_their_own(num_groups, per_group, size):
    num_units = num_groups * per_group
    for is_shared in (False, True):
        if num_units < size and not is_shared:
            continue
        cuts = cut_groups(num_units, num_groups, size, is_shared=is_shared)
        assert len(cuts) == size
        held = [unit for start, stop in cuts for unit in range(start, stop)]
        assert set(held) == set(range(num_units))
        touched = [{unit // per_group for unit in range(*cut)} for cut in cuts]
        if not is_shared or num_groups >= size:
            assert held == list(range(num_units)), "one rank has each unit"
        if num_groups >= size:
            assert all(start % per_group == stop % per_group == 0 for start, stop in cuts)
            lengths = [len(groups) for groups in touched]
            assert lengths == sorted(lengths, reverse=True)
        else:
            assert all(len(groups) <= 1 for groups in touched), "a rank works for one group"
            if is_shared:
                assert [stop - start for start, stop in cuts] == [per_group] * size
        sharers = [sum(group in groups for groups in touched) for group in range(num_groups)]
        if num_groups < size and is_shared:
            assert max(sharers) - min(sharers) <= 1


def test_groups_are_cut_as_the_description_says():
    assert cut_groups(6, 3, 2) == [(0, 4), (4, 6)]
    assert cut_groups(6, 2, 4) == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert cut_groups(2, 2, 4, is_shared=True) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert cut_groups(3, 1, 3) == [(0, 1), (1, 2), (2, 3)]


def test_what_can_not_be_cut_is_refused():
    with pytest.raises(ConfigError, match=r"5 units are no multiple of 2 groups"):
        cut_groups(5, 2, 2)
    with pytest.raises(ConfigError, match=r"3 units can't be split over 4 ranks\. Use .* of at most 3\."):
        cut_groups(3, 1, 4)
    with pytest.raises(ConfigError, match=r"Dimension 1 of shape \(4, 7\) is no multiple of 2 \+ 1 units"):
        split_dimension((4, 7), 1, [Block(2, 1), Block(1, 1)], rank=0, size=1)


@st.composite
def fused(draw):
    """A tensor of queries, keys and values along one dimension, in some order, or of queries; and a number of ranks."""
    size = draw(st.integers(1, 5))
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    if groups * per_group < size:
        per_group = -(-size // groups)
    queries = Block(groups * per_group, groups)
    shared = Block(groups, groups, is_shared=True)
    blocks = draw(st.sampled_from([[queries], [queries, shared, shared], [shared, queries]]))
    unit = draw(st.integers(1, 3))
    length = unit * sum(block.num_units for block in blocks)
    dim = draw(st.integers(0, 2))
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    shape[dim] = length
    return tuple(shape), dim, blocks, size


@given(fused())
def test_ranks_hold_everything_and_one_owns_each_element(case):
    shape, dim, blocks, size = case
    splits = [split_dimension(shape, dim, blocks, rank=rank, size=size) for rank in range(size)]
    whole = torch.arange(math.prod(shape)).view(shape) + 1
    owned, held = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for split in splits:
        local = split.take(whole)
        assert tuple(local.shape) == split.local_shape
        assert local.is_contiguous()
        assert len(split.boxes) == len(split.ranges) == len(blocks)
        parts = [whole[tuple(slice(*span) for span in box)] for box in split.boxes]
        assert all(map(torch.equal, split.parts(local), parts))
        everything, mine = split.spread(local, owned_only=False), split.spread(local, owned_only=True)
        assert set(everything.unique().tolist()) <= {0, *local.reshape(-1).tolist()}
        held += everything != 0
        owned += mine
        for start in range(0, local.numel(), 2):
            values = local.reshape(-1)[start : start + 3]
            expected = [value for value in values.tolist() if value in mine]
            assert split.counted(values, start).reshape(-1).tolist() == expected
    assert torch.equal(owned, whole), "one rank owns each element, in its place"
    assert held.min() >= 1
    assert all(split.is_shared == (int(held.max()) > 1) for split in splits)


def test_a_split_without_a_word_on_owners_owns_all():
    split = Split((6,), 0, ((0, 1), (3, 5)))
    assert split.owned == (True, True)
    assert not split.is_shared
    assert split.local_shape == (3,)
    values = torch.ones(3)
    assert split.counted(values, 0) is values


def test_units_are_on_one_rank_each_unless_they_may_be_shared():
    assert split_dimension((4,), 0, [Block(4, 1)], rank=1, size=2).ranges == ((2, 4),)
    assert split_dimension((4,), 0, [Block(4, 1, is_shared=True)], rank=1, size=2).ranges == ((0, 4),)


def test_a_part_is_a_copy():
    whole = torch.zeros(4, 2)
    for ranges in (((1, 3),), ((0, 1), (2, 3))):
        Split((4, 2), 0, ranges).take(whole).fill_(1.0)
    assert not whole.any()


def test_a_part_is_contiguous_whatever_the_order_of_the_whole_in_memory():
    whole = torch.arange(2 * 4 * 3 * 3).view(2, 4, 3, 3).to(memory_format=torch.channels_last)
    for ranges in (((1, 3),), ((0, 1), (2, 4))):
        part = Split((2, 4, 3, 3), 1, ranges).take(whole)
        assert part.is_contiguous()
        assert torch.equal(part, torch.cat([whole[:, start:stop] for start, stop in ranges], 1))


def test_owners_of_another_number_of_ranges_are_refused():
    split = Split((6,), 0, ((0, 1), (3, 5)), owned=(False,))
    with pytest.raises(ValueError, match="zip"):
        split.spread(torch.ones(3), owned_only=False)
    with pytest.raises(ValueError, match="zip"):
        split.counted(torch.ones(3), 0)


def test_a_part_of_a_number_seen_everywhere_takes_no_memory():
    whole = torch.tensor(7.0).expand(4, 6)
    part = Split((4, 6), 1, ((0, 2), (4, 5))).take(whole)
    assert part.shape == (4, 3)
    assert part.data_ptr() == whole.data_ptr()
    assert (part == 7.0).all()


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(1.0).expand(3), True),
        (torch.tensor(1.0).expand(1, 3), True),
        (torch.ones(3, 1).expand(3, 2), False),
        (torch.ones(1), False),
        (torch.ones(()), False),
        (torch.ones(0), False),
        (torch.tensor(1.0).expand(0), False),
        (torch.ones(2), False),
        (torch.ones(1, 2).expand(2, 2)[:, :1], True),
    ],
)
def test_a_repeated_number_is_told_by_its_strides(tensor, expected):
    assert is_repeated(tensor) is expected
