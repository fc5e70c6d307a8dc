"""Which rows of a parameter each rank has: the chunks that torch makes, also where there are fewer rows than ranks."""

from itertools import pairwise

import pytest
import torch

from booster_fsdp.pieces import row_bounds


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5), (3, 4), (5, 2, 2), (8, 1), (0, 3)], ids=str)
def test_rows_are_those_of_torch_s_chunks(shape, size):
    row_numel = torch.empty(shape[1:]).numel()
    lengths = [len(chunk) * row_numel for chunk in torch.empty(shape).chunk(size)] if shape[0] else []
    lengths += [0] * (size - len(lengths))
    bounds = row_bounds(shape, size)
    assert len(bounds) == size + 1
    assert bounds[0] == 0
    assert [stop - start for start, stop in pairwise(bounds)] == lengths
