import torch
import torch.distributed as dist
from matrix import matrix, named

from booster_runtime import collectives
from booster_testing import run_on_ranks


def values(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduces(bounds, dtype, out_dtype, scale, accumulate):
    rank, size = dist.get_rank(), dist.get_world_size()
    source = values(rank, bounds[-1], dtype)
    out = torch.full((bounds[rank + 1] - bounds[rank],), 2.0, dtype=out_dtype)
    pending = collectives.reduce_scatter(source, bounds, out, scale=scale, accumulate=accumulate)
    pending.wait()
    pending.wait()  # a second wait changes nothing
    whole = sum(values(peer, bounds[-1], dtype).double() for peer in range(size))
    expected = whole[bounds[rank] : bounds[rank + 1]] * scale + (2.0 if accumulate else 0.0)
    # One rounding where the format is narrow; a few of fp32 else.
    tolerance = {"rtol": 2**-8, "atol": 1e-6} if out_dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(out.double(), expected, **tolerance)


def gathers(bounds, dtype):
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = values(99, bounds[-1], dtype)
    buffer = torch.full_like(expected, -7.0)
    own = slice(bounds[rank], bounds[rank + 1])
    buffer[own] = expected[own]
    first, second = collectives.all_gather(buffer, bounds), collectives.all_gather(buffer.clone(), bounds)
    first.wait()
    second.wait()
    assert torch.equal(buffer, expected)
    assert collectives.all_gather_object(rank) == list(range(size))


BOUNDS = {1: (0, 12), 2: (0, 6, 12), 3: (0, 4, 8, 12)}
UNEVEN = {2: (0, 0, 11), 3: (0, 5, 5, 17)}


@matrix(
    ["False-torch.float32-torch.float32-(0, 12)"],
    accumulate=[False, True],
    **{
        "dtype, out_dtype": named(
            [
                (torch.float32, torch.float32),
                (torch.bfloat16, torch.float32),
                (torch.bfloat16, torch.bfloat16),
                (torch.float64, torch.float64),
                (torch.float32, torch.bfloat16),
            ],
            str,
            joint=True,
        )
    },
    bounds=named([*BOUNDS.values(), *UNEVEN.values()], str),
)
def test_a_reduction_gives_each_rank_its_slice_of_the_sum(bounds, dtype, out_dtype, accumulate):
    run_on_ranks(reduces, len(bounds) - 1, bounds, dtype, out_dtype, 0.5, accumulate)


@matrix(
    ["torch.float32-(0, 12)"],
    dtype=named([torch.float32, torch.bfloat16, torch.float16], str),
    bounds=named([*BOUNDS.values(), *UNEVEN.values()], str),
)
def test_a_gather_fills_the_buffer_in_place(bounds, dtype):
    run_on_ranks(gathers, len(bounds) - 1, bounds, dtype)


def in_flight_with_users_messages():
    """Messages that the user sends between the same ranks are not mistaken for ours."""
    rank = dist.get_rank()
    source = torch.full((8,), float(rank + 1))
    out = torch.empty(4)
    pending = collectives.reduce_scatter(source, (0, 4, 8), out)
    theirs = torch.empty(4)
    works = [dist.isend(torch.full((4,), 100.0 + rank), 1 - rank), dist.irecv(theirs, 1 - rank)]
    for work in works:
        work.wait()
    pending.wait()
    assert torch.equal(out, torch.full((4,), 3.0))
    assert torch.equal(theirs, torch.full((4,), 101.0 - rank))


def test_messages_of_the_user_stay_apart():
    run_on_ranks(in_flight_with_users_messages, 2)


def first_ranks_values():
    tensor = torch.full((3,), float(dist.get_rank()))
    collectives.broadcast(tensor).wait()
    assert torch.equal(tensor, torch.zeros(3))
    collectives.all_reduce(tensor.add_(dist.get_rank() + 1), dist.ReduceOp.MAX).wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))


def test_broadcast_and_all_reduce_take_a_tensor_in_place():
    run_on_ranks(first_ranks_values, 2)
