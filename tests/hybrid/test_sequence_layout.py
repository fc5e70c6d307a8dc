"""Every position of a sequence lies on exactly one rank, whatever the numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.ulysses import head_ranges

LAYOUTS = st.builds(SequenceLayout, st.integers(0, 70), st.integers(1, 9), st.booleans())


@given(LAYOUTS)
def test_parts_put_together_are_the_whole(layout):
    whole = torch.arange(2 * layout.length * 3).view(2, layout.length, 3)
    parts = [layout.take(whole, 1, rank) for rank in range(layout.size)]
    assert [part.shape[1] for part in parts] == list(layout.lengths)
    assert sum(layout.lengths) == layout.length
    assert torch.equal(layout.put_together(parts, 1), whole)


def test_contiguous_parts_are_views():
    layout = SequenceLayout(5, 2)
    assert layout.ranges == (((0, 3),), ((3, 5),))
    whole = torch.arange(10).view(2, 5)
    assert [layout.take(whole, 1, rank).data_ptr() for rank in range(2)] == [whole.data_ptr(), whole[0, 3:].data_ptr()]


@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_of_another_number_of_ranks_are_refused(num_parts):
    with pytest.raises(ValueError, match="zip"):
        SequenceLayout(4, 2).put_together([torch.ones(2)] * num_parts, 0)


@given(LAYOUTS)
def test_no_rank_has_two_positions_more_than_another_for_each_of_its_chunks(layout):
    assert max(layout.lengths) - min(layout.lengths) <= (2 if layout.zigzag else 1)


@given(st.integers(1, 6), st.integers(1, 5))
def test_zigzag_balances_visible_pairs(size, chunk):
    layout = SequenceLayout(2 * size * chunk, size, zigzag=True)
    pairs = [sum(position + 1 for span in spans for position in range(*span)) for spans in layout.ranges]
    assert len(set(pairs)) == 1


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_each_query_head_finds_its_key_head(size, share, per_head):
    num_heads = size * share * per_head
    ranges = head_ranges(num_heads, num_heads // per_head, size)
    assert [head for (first, last), _ in ranges for head in range(first, last)] == list(range(num_heads))
    for (first, last), (first_kv, last_kv) in ranges:
        assert {head // per_head for head in range(first, last)} == set(range(first_kv, last_kv))


def test_heads_that_do_not_divide_are_named_with_sizes_that_do():
    with pytest.raises(ConfigError, match=r"6 heads are no multiple of 4 ranks. Use `sp_size` of 1, 2, 3, 6, or 'ring"):
        head_ranges(6, 2, 4)
