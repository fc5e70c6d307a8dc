"""Collectives on flat buffers: what each rank gets, and that ranks may wait in any order."""

import threading
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from matrix import matrix, named
from ranked import on_ranks

from booster_runtime import collectives
from booster_runtime.collectives.pending import WAITS, Pending


def values(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


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
@on_ranks(lambda bounds: len(bounds) - 1)
def test_a_reduction_gives_each_rank_its_slice_of_the_sum(bounds, dtype, out_dtype, accumulate):
    rank, size = dist.get_rank(), dist.get_world_size()
    source = values(rank, bounds[-1], dtype)
    out = torch.full((bounds[rank + 1] - bounds[rank],), 2.0, dtype=out_dtype)
    pending = collectives.reduce_scatter(source, bounds, out, scale=0.5, accumulate=accumulate)
    pending.wait()
    pending.wait()  # a second wait changes nothing
    whole = sum(values(peer, bounds[-1], dtype).double() for peer in range(size))
    expected = whole[bounds[rank] : bounds[rank + 1]] * 0.5 + (2.0 if accumulate else 0.0)
    # One rounding where the format is narrow; a few of fp32 else.
    tolerance = {"rtol": 2**-8, "atol": 1e-6} if out_dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(out.double(), expected, **tolerance)


@matrix(
    ["torch.float32-(0, 12)"],
    dtype=named([torch.float32, torch.bfloat16, torch.float16], str),
    bounds=named([*BOUNDS.values(), *UNEVEN.values()], str),
)
@on_ranks(lambda bounds: len(bounds) - 1)
def test_a_gather_fills_the_buffer_in_place(bounds, dtype):
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


@on_ranks(2)
def test_messages_of_the_user_stay_apart():
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


@on_ranks(2)
def test_broadcast_and_all_reduce_take_a_tensor_in_place():
    tensor = torch.full((3,), float(dist.get_rank()))
    collectives.broadcast(tensor).wait()
    assert torch.equal(tensor, torch.zeros(3))
    collectives.all_reduce(tensor.add_(dist.get_rank() + 1), dist.ReduceOp.MAX).wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))


def term(rank, numel, dtype):
    """Return values whose sum depends on its order, as floating sums do."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)).to(
        dtype
    )


def in_rank_order(size, numel, dtype, op_name):
    """Return the sum or average in rank order, in fp32 if the dtype is narrower."""
    wide = torch.promote_types(dtype, torch.float32)
    total = term(0, numel, dtype).to(wide)
    for rank in range(1, size):
        total = total + term(rank, numel, dtype).to(wide)
    return (total * (1.0 / size) if op_name == "AVG" else total).to(dtype)


@matrix(
    2,
    num_ranks=[2, 3, 4],
    op_name=["SUM", "AVG"],
    dtype=named([torch.float32, torch.bfloat16, torch.float16], str),
)
@on_ranks("num_ranks")
def test_all_reduce_sums_in_rank_order_and_fp32(num_ranks, op_name, dtype):
    for numel in (1, 1000, 100_003):  # small and large ones travel differently
        tensor = term(dist.get_rank(), numel, dtype)
        collectives.all_reduce(tensor, getattr(dist.ReduceOp, op_name)).wait()
        torch.testing.assert_close(tensor, in_rank_order(num_ranks, numel, dtype, op_name), rtol=0, atol=0)


@matrix(
    1,
    num_ranks=[2, 3],
    numel=[0, 1, 1000, 200_001],
    **{"dtype, op_name": named([(torch.float32, "MAX"), (torch.int64, "SUM"), (torch.int64, "MIN")], str, joint=True)},
)
@on_ranks("num_ranks")
def test_all_reduce_is_exact_where_no_order_changes_the_result(num_ranks, numel, dtype, op_name):
    op = getattr(dist.ReduceOp, op_name)
    tensor = values(dist.get_rank(), numel, torch.float32).mul(100).to(dtype)
    terms = [values(peer, numel, torch.float32).mul(100).to(dtype) for peer in range(dist.get_world_size())]
    expected = {"SUM": torch.sum, "MAX": torch.amax, "MIN": torch.amin}[op_name](torch.stack(terms), 0)
    collectives.all_reduce(tensor, op).wait()
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_an_average_of_halves_does_not_overflow_in_the_sum(num_ranks):
    tensor = torch.full((200_000,), 60_000.0, dtype=torch.float16)
    collectives.all_reduce(tensor, dist.ReduceOp.AVG).wait()
    assert bool((tensor == torch.tensor(60_000.0).half()).all())


@on_ranks(3)
def test_reduce_scatter_into_a_narrower_dtype_keeps_the_source():
    source = term(dist.get_rank(), 12, torch.float32)
    before = source.clone()
    collectives.reduce_scatter(source, range(0, 13, 4), torch.empty(4, dtype=torch.bfloat16)).wait()
    assert torch.equal(source, before)


@on_ranks(3)
def test_ranks_may_wait_for_large_sums_in_any_order():
    """Large sums on three ranks have two halves; the order of waits may not block the second."""
    rank = dist.get_rank()
    for _ in range(12):
        tensors = [torch.full((50_000,), float(rank + part)) for part in range(3)]
        works = [collectives.all_reduce(tensor) for tensor in tensors]
        if rank == 1:
            works[0].wait()
        for part in torch.randperm(3, generator=torch.Generator().manual_seed(rank)).tolist():
            works[part].wait()
        for part, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((50_000,), 3.0 + 3 * part))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks("num_ranks")
def test_each_rank_gets_the_slices_that_the_others_have_for_it(num_ranks):
    """Each rank has a slice of another length for each other; a third of them is empty."""
    lengths = [[3, 0, 5, 7], [2, 4, 0, 1], [0, 9, 6, 0], [8, 1, 0, 2]]
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [0, *accumulate(lengths[rank][:size])]
    received = [0, *accumulate(lengths[peer][rank] for peer in range(size))]
    source = torch.arange(sent[-1]) + 1000 * rank
    expected = [1000 * peer + sum(lengths[peer][:rank]) + torch.arange(lengths[peer][rank]) for peer in range(size)]
    out = torch.full((received[-1],), -1)
    collectives.all_to_all(source, sent, out, received).wait()
    assert torch.equal(out, torch.cat(expected))


@on_ranks(2, group_timeout_seconds=10.0)
def test_collectives_that_nobody_waits_for_take_no_message_of_the_next():
    rank = dist.get_rank()
    for number in range(3):
        collectives.all_reduce(torch.full((4,), float(rank + number)), dist.ReduceOp.SUM)
    last = torch.full((4,), float(rank))
    collectives.all_reduce(last, dist.ReduceOp.SUM).wait()
    assert last.tolist() == [1.0] * 4


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list a process's open files there")
@on_ranks(2)
def test_groups_that_are_destroyed_leave_no_files_or_threads():
    tensor = torch.ones(300_000)

    def use():
        for _ in range(5):
            group = dist.new_group()
            collectives.all_reduce(tensor, group=group).wait()
            collectives.all_reduce(tensor[:8].clone(), group=group).wait()
            dist.destroy_process_group(group)

    def held():
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    use()
    before = held()
    use()
    after = held()
    assert after == before


def test_a_collective_without_a_process_group_says_what_to_start():
    with pytest.raises(RuntimeError, match="needs a process group"):
        collectives.all_reduce(torch.ones(1))


def test_waits_inside_of_a_wait_are_one():
    seen = []

    class Work:
        def wait(self):
            seen.append(WAITS.is_in_one)

    Pending([Pending([Work()]), Work()]).wait()
    assert seen == [True, True]
    assert not WAITS.is_in_one
