"""Parts of a flat buffer, cut to a range: each element of both is found once, with its place in the buffer."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from booster_runtime.collectives.sums import overlaps


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
