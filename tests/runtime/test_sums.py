"""Reductions over ranks: in rank order, rounded once where the format is narrow, also in place and on top of a sum."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from booster_runtime.collectives.sums import combine_into, overlaps, scale_of, sum_into

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def draw(count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def in_order(parts, dtype, scale, before=None):
    """Add up one after the other in the format that is carried, and round the result to the one that is kept."""
    carried = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(carried)
    for part in parts[1:]:
        total = total + part.to(carried)
    total = total * scale
    return (total if before is None else total + before.to(carried)).to(dtype)


@given(st.integers(1, 5), DTYPES, st.sampled_from([1.0, 0.5, 1 / 3, 2.0]))
def test_parts_are_added_in_their_order_and_rounded_once(count, dtype, scale):
    parts = draw(count, dtype)
    out = torch.full((5,), math.nan, dtype=dtype)
    sum_into(out, parts, scale=scale, accumulate=False)
    assert torch.equal(out, in_order(parts, dtype, scale))
    assert all(map(torch.equal, parts, draw(count, dtype)))


@given(st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([1.0, 0.5, 1 / 3]))
def test_what_is_there_takes_part_in_the_one_rounding(count, dtype, scale):
    parts, (before,) = draw(count, dtype), draw(1, dtype, seed=1)
    out = before.clone()
    sum_into(out, parts, scale=scale, accumulate=True)
    assert torch.equal(out, in_order(parts, dtype, scale, before))


@given(st.integers(1, 4), st.sampled_from([torch.float32, torch.float64]), st.sampled_from([1.0, 0.5, 2.0]))
def test_each_part_is_added_to_a_wide_sum(count, dtype, scale):
    parts, (before,) = draw(count, dtype), draw(1, dtype, seed=1)
    out, expected = before.clone(), before.clone()
    sum_into(out, parts, scale=scale, accumulate=True)
    for part in parts:
        expected = expected + scale * part
    torch.testing.assert_close(out, expected)


@given(st.integers(1, 5), st.data(), DTYPES)
def test_the_result_may_take_the_place_of_any_part(count, data, dtype):
    place = data.draw(st.integers(0, count - 1))
    parts = draw(count, dtype)
    sum_into(parts[place], parts, scale=0.5, accumulate=False)
    assert torch.equal(parts[place], in_order(draw(count, dtype), dtype, 0.5))
    others = [position for position in range(count) if position != place]
    assert all(torch.equal(parts[position], draw(count, dtype)[position]) for position in others)


@given(st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float16]))
def test_narrow_parts_add_up_in_a_wide_result(count, dtype):
    parts = draw(count, dtype)
    out = torch.full((5,), math.nan)
    sum_into(out, parts, scale=1.0, accumulate=False)
    assert torch.equal(out, in_order([part.float() for part in parts], torch.float32, 1.0))


@given(st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float16]))
def test_wide_parts_are_rounded_once_into_a_narrow_result_and_stay_as_they_are(count, dtype):
    parts = draw(count, torch.float32)
    out = torch.full((5,), math.nan, dtype=dtype)
    sum_into(out, parts, scale=0.5, accumulate=False)
    assert torch.equal(out, in_order(parts, torch.float32, 0.5).to(dtype))
    assert all(map(torch.equal, parts, draw(count, torch.float32)))


def test_small_terms_are_not_lost_to_a_narrow_format():
    """Rounded after each addition, 256 + 1 would stay 256 in bf16."""
    parts = [torch.tensor([256.0], dtype=torch.bfloat16), *(torch.ones(1, dtype=torch.bfloat16) for _ in range(4))]
    out = torch.zeros(1, dtype=torch.bfloat16)
    sum_into(out, parts, scale=1.0, accumulate=False)
    assert float(out) == 260.0
    sum_into(out, parts[1:4], scale=1.0, accumulate=True)
    assert float(out) == 264.0, "263 is between two numbers of bf16, and even"


OPERATIONS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN]


@pytest.mark.parametrize("op", OPERATIONS, ids=["sum", "avg", "max", "min"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_terms_of_ranks_are_combined_the_same_wherever_the_result_is(op, count):
    expected = torch.stack(draw(count, torch.float64))
    expected = {
        dist.ReduceOp.SUM: expected.sum(0),
        dist.ReduceOp.AVG: expected.mean(0),
        dist.ReduceOp.MAX: expected.amax(0),
        dist.ReduceOp.MIN: expected.amin(0),
    }[op]
    found = []
    for place in range(count):
        terms = draw(count, torch.float64)
        combine_into(terms[place], terms, op)
        found.append(terms[place])
        torch.testing.assert_close(found[-1], expected)
        assert all(torch.equal(terms[each], draw(count, torch.float64)[each]) for each in range(count) if each != place)
    assert all(torch.equal(one, other) for one, other in itertools.pairwise(found))


def test_only_a_mean_is_divided_by_the_number_of_ranks():
    assert [scale_of(op, 4) for op in OPERATIONS] == [1.0, 0.25, 1.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=5), st.integers(0, 30), st.integers(0, 30))
def test_pieces_are_what_parts_and_range_have_in_common(gaps, low, high):
    parts, held, position = [], {}, 0
    for gap, length in gaps:
        position += gap
        values = torch.arange(position, position + length) + 100
        parts.append((position, values))
        held.update(zip(range(position, position + length), values.tolist(), strict=True))
        position += length
    expected = {index: value for index, value in held.items() if low <= index < high}
    pieces = overlaps(parts, low, high)
    found = [(start + index, value) for start, part in pieces for index, value in enumerate(part.tolist())]
    assert found == sorted(expected.items())
    assert all(part.numel() for _, part in pieces)


def test_pieces_are_views():
    whole = torch.zeros(6)
    ((start, piece),) = overlaps([(10, whole)], 12, 14)
    piece.fill_(1.0)
    assert (start, whole.tolist()) == (12, [0, 0, 1, 1, 0, 0])
