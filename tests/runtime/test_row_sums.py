"""Sums of matrices with few rows that are not zero: the bits of whole matrices' sums, and fewer bytes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks

from booster_runtime import collectives
from booster_runtime.collectives.sums import touched_rows

ROWS, WIDTH = 40, 7
TOUCHED = {
    "own": lambda rank: [3 * rank, 13, 39],
    "the same": lambda rank: [0, 14, 27],
    "none on one": lambda rank: [] if rank == 0 else [13, 14],
    "all on one": lambda rank: range(ROWS) if rank == 1 else [13],
    "all": lambda rank: range(ROWS),
    "none": lambda rank: [],
}
FORMATS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
]


def term(name, dtype, width):
    """Return this rank's matrix, with sums that depend on their order."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    powers = 10.0 ** torch.randint(-3, 4, (ROWS, width), generator=generator)
    matrix = (torch.randn(ROWS, width, generator=generator) * powers).to(dtype)
    is_touched = torch.zeros(ROWS, 1, dtype=torch.bool)
    is_touched[list(TOUCHED[name](rank))] = True
    return torch.where(is_touched, matrix, torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_sums_of_rows_have_the_bits_of_whole_sums(num_ranks):
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for width in (WIDTH, 8):
        share = -(-ROWS * width // size // 16) * 16 + 16
        even, uneven = range(0, size * share + 1, share), (0, *(5 * width + 3,) * (size - 1), ROWS * width + 4)
        for bounds in (even, uneven) if size > 1 else (even,):
            for name in TOUCHED:
                for dtype, out_dtype in FORMATS:
                    for accumulate in (False, True):
                        matrix = term(name, dtype, width)
                        before = torch.randn(bounds[rank + 1] - bounds[rank], dtype=torch.float64).to(out_dtype)
                        outs = [before.clone(), before.clone()]
                        settings = {"scale": 1.0 / size, "accumulate": accumulate}
                        for part, out in zip((matrix.view(-1), matrix), outs, strict=True):
                            collectives.reduce_scatter([(0, part)], bounds, out, **settings).wait()
                        if not torch.equal(*outs):
                            wrong.append((width, tuple(bounds), name, dtype, out_dtype, accumulate))
    assert wrong == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks("num_ranks")
def test_parts_may_be_flat_and_matrices(num_ranks):
    rank, size = dist.get_rank(), dist.get_world_size()
    few, many = term("own", torch.float32, WIDTH), term("all on one", torch.float32, WIDTH)
    flat = torch.randn(50, generator=torch.Generator().manual_seed(rank))
    parts = [(2, flat), (56, few), (56 + few.numel(), many)]
    end = 60 + 2 * few.numel()
    equal = []
    for bounds in ((0, *(53,) * (size - 1), end), (0, *range(60, 60 + 200 * (size - 1), 200), end)):
        outs = [torch.full((bounds[rank + 1] - bounds[rank],), 7.0) for _ in range(2)]
        collectives.reduce_scatter(parts, bounds, outs[0], scale=0.5).wait()
        flattened = [(offset, part.view(-1)) for offset, part in parts]
        collectives.reduce_scatter(flattened, bounds, outs[1], scale=0.5).wait()
        equal.append(torch.equal(*outs))
    assert equal == [True, True]


@on_ranks(2)
def test_values_that_are_not_finite_count_as_touched():
    matrix = torch.zeros(ROWS, WIDTH)
    matrix[5, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    share = ROWS * WIDTH // 2
    out = torch.ones(share)
    collectives.reduce_scatter([(0, matrix)], (0, share, 2 * share), out).wait()
    if dist.get_rank() == 0:
        assert out[35].isnan()
        assert out[36:38].tolist() == [float("inf"), -float("inf")]
    assert out.count_nonzero() == (3 if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_several_sums_of_rows_may_be_underway():
    rank, size = dist.get_rank(), dist.get_world_size()
    matrices = [torch.zeros(ROWS, WIDTH) for _ in range(3)]
    for number, matrix in enumerate(matrices):
        matrix[[rank, 13 + number * rank, 39 - number]] = 1.0 + number
    share = ROWS * WIDTH // size
    bounds = range(0, size * share + 1, share)
    outs = [torch.empty(share) for _ in matrices]
    pending = [
        collectives.reduce_scatter([(0, matrix)], bounds, out) for matrix, out in zip(matrices, outs, strict=True)
    ]
    for each in pending if rank else reversed(pending):
        each.wait()
    for matrix in matrices:
        dist.all_reduce(matrix)
    own = slice(bounds[rank], bounds[rank + 1])
    assert all(torch.equal(out, matrix.view(-1)[own]) for out, matrix in zip(outs, matrices, strict=True))


def test_rows_are_found_wherever_they_begin_in_memory():
    for width in (1, 7, 8):
        for offset in (0, 1, 2):
            matrix = torch.zeros(ROWS * width + offset)[offset:].view(ROWS, width)
            matrix[3, -1] = -1.0
            matrix[5, 0] = torch.tensor(1e-45)  # the least number
            assert touched_rows(matrix).tolist() == [3, 5]
            assert touched_rows(matrix + 1.0) is None


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_what_is_sent_is_the_touched_rows(num_ranks):
    rows, width = 1024, 64
    whole = rows * width * 4 * (num_ranks - 1) // num_ranks
    share = rows * width // num_ranks
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(dist.get_rank()))
    for num_touched, most in ((32, 0.05 * whole), (512, whole + 8 * num_ranks)):  # all rows, and a number that says so
        matrix = torch.zeros(rows, width)
        matrix[order[:num_touched]] = 1.0
        with mock.patch.object(dist, "isend", wraps=dist.isend) as sends:
            bounds = range(0, rows * width + 1, share)
            collectives.reduce_scatter([(0, matrix)], bounds, torch.empty(share)).wait()
        assert sum(call.args[0].nbytes for call in sends.call_args_list) <= most
