"""The direct transport: the same bits as the portable one, errors on every rank, and no hangs."""

from __future__ import annotations

import os
import random
import threading
import time
from itertools import accumulate, pairwise

import psutil
import pytest
import torch
import torch.distributed as dist
from matrix import matrix, named

from booster_core.errors import ConfigError
from booster_runtime import collectives
from booster_runtime.collectives.transports import transport_of
from booster_runtime.collectives.transports.direct import connection, memory
from booster_testing import RankDiedError, expect_on_ranks, run_on_ranks


@pytest.fixture(autouse=True)
def over_direct(monkeypatch):
    monkeypatch.setenv("BOOSTER_TRANSPORT", "direct")


def group_over(name):
    """Return a new group of all ranks that uses a transport."""
    os.environ["BOOSTER_TRANSPORT"] = name  # put back after the call
    group = dist.new_group()
    assert transport_of(group).name == name
    return group


def values(seed, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both_ways(dtype, out_dtype, edges):
    rank = dist.get_rank()
    pairs = []
    for group in map(group_over, ("torch", "direct")):
        parts = [
            (edges[0], values(rank, edges[1] - edges[0], dtype)),
            (edges[1], values(9, edges[-1] - edges[1], dtype)),
        ]
        bounds = [edges[-1] * index // dist.get_world_size() for index in range(dist.get_world_size() + 1)]
        out = torch.full((bounds[rank + 1] - bounds[rank],), 3.0, dtype=out_dtype)
        collectives.reduce_scatter_parts(parts, bounds, out, group, scale=0.25, accumulate=True).wait()
        buffer = values(rank, edges[-1], dtype)
        collectives.all_gather(buffer, bounds, group).wait()
        told = values(rank, 77, dtype)
        collectives.broadcast(told, group).wait()
        pairs.append((out, buffer, told))
    for slow, fast in zip(*pairs, strict=True):
        assert torch.equal(slow, fast)


@matrix(
    ["torch.bfloat16-torch.float32-2"],
    **{
        "dtype, out_dtype": named(
            [
                (torch.float32, torch.float32),
                (torch.bfloat16, torch.float32),
                (torch.float16, torch.float16),
                (torch.float64, torch.float64),
            ],
            str,
            joint=True,
        )
    },
    num_ranks=[2, 3, 4],
)
def test_results_equal_the_portable_transports_bits(num_ranks, dtype, out_dtype):
    run_on_ranks(both_ways, num_ranks, dtype, out_dtype, (0, 1000, 1003))
    run_on_ranks(both_ways, num_ranks, dtype, out_dtype, (0, 300_000, 300_001))


def reduces(numel, dtype, op_name):
    op = getattr(dist.ReduceOp, op_name)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = values(rank, numel, torch.float32).mul(100).to(dtype)
    collectives.all_reduce(tensor, op).wait()
    terms = torch.stack([values(peer, numel, torch.float32).mul(100).to(dtype).double() for peer in range(size)])
    expected = {"SUM": terms.sum(0), "AVG": terms.mean(0), "MAX": terms.amax(0), "MIN": terms.amin(0)}[op_name]
    # One rounding of a sum of narrow numbers; a few of wide ones.
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-5, torch.int64: 0.0}[dtype]
    torch.testing.assert_close(tensor.double(), expected, rtol=tolerance, atol=1e-4 if dtype == torch.float32 else 0.0)
    every = collectives.all_gather_object(tensor)
    assert all(torch.equal(every[0], other) for other in every)


# the size decides the way, whatever the type; `nox -s direct` reduces more of them
@matrix(
    ["torch.int64-MIN-1000-2"],
    **{
        "dtype, op_name": named(
            [
                (torch.float32, "SUM"),
                (torch.float32, "AVG"),
                (torch.float32, "MAX"),
                (torch.bfloat16, "SUM"),
                (torch.bfloat16, "AVG"),
                (torch.int64, "SUM"),
                (torch.int64, "MIN"),
            ],
            str,
            joint=True,
        )
    },
    numel=[0, 1, 1000, 200_001],
    num_ranks=[2, 3],
)
def test_all_reduce_gives_every_rank_the_same_bits(num_ranks, numel, dtype, op_name):
    run_on_ranks(reduces, num_ranks, numel, dtype, op_name)


def many_at_once(rounds):
    """Start operations on two groups in one order, and wait for them in another one on each rank, after delays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    own = random.Random(rank)
    for index in range(rounds):
        numel = 100 + 5000 * (index % 4)
        bounds = [numel * each // size for each in range(size + 1)]
        source = torch.full((numel,), float(rank + index))
        out = torch.empty(bounds[rank + 1] - bounds[rank])
        buffer = torch.full((numel,), float(rank))
        large = torch.full((20_000,), 1.0 + rank)
        time.sleep(own.random() * 0.002)
        works = [
            collectives.reduce_scatter(source, bounds, out),
            collectives.all_reduce(large, group=half),
            collectives.all_gather(buffer, bounds),
        ]
        own.shuffle(works)
        for work in works:
            time.sleep(own.random() * 0.001)
            work.wait()
        assert torch.equal(out, torch.full_like(out, float(sum(peer + index for peer in range(size)))))
        assert torch.equal(large, torch.full_like(large, 3.0 if rank < 2 else 7.0))
        for peer, (low, high) in enumerate(pairwise(bounds)):
            assert torch.equal(buffer[low:high], torch.full((high - low,), float(peer)))


def test_two_hundred_rounds_with_waits_in_any_order():
    run_on_ranks(many_at_once, 4, 200, timeout_seconds=120)


def more_than_fit():
    rank = dist.get_rank()
    tensors = [torch.full((8,), float(rank + index)) for index in range(200)]
    works = [collectives.all_reduce(tensor) for tensor in tensors]
    for index, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        assert torch.equal(tensor, torch.full((8,), 1.0 + 2 * index))


def test_one_operation_too_many_waits_for_the_oldest():
    run_on_ranks(more_than_fit, 2)


def waits_elsewhere():
    """Rank 0 waits for the operation and then for the barrier, rank 1 the other way around."""
    tensor = torch.ones(50_000)
    work = collectives.all_reduce(tensor)
    if dist.get_rank() == 0:
        work.wait()
        dist.barrier()
    else:
        dist.barrier()
        work.wait()
    assert torch.equal(tensor, torch.full((50_000,), 2.0))


def test_a_rank_in_a_barrier_does_not_block_the_others():
    run_on_ranks(waits_elsewhere, 2, timeout_seconds=20)


def one_stays_away():
    if dist.get_rank() == 0:
        collectives.all_reduce(torch.ones(4)).wait()
    else:
        assert transport_of(None).name == "direct"
        time.sleep(4)
        msg = "timed out: that was long enough"
        raise RuntimeError(msg)


def test_a_missing_rank_raises_at_the_time_limit():
    expect_on_ranks(RuntimeError, "timed out", one_stays_away, 2, group_timeout_seconds=2, timeout_seconds=30)


def different_calls(case, odd_rank):
    """Each rank makes a call; that of ``odd_rank`` is another one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = CALLS[case]
    assert transport_of(None).name == "direct"
    calls[rank == odd_rank](rank, size)


def _reduce(numel=8, dtype=torch.float32, op=dist.ReduceOp.SUM):
    return lambda _rank, _size: collectives.all_reduce(torch.ones(numel, dtype=dtype), op).wait()


def _scatter(edges, *, offset=0):
    def call(rank, size):
        bounds = [edge * 2 // size for edge in range(size + 1)] if edges is None else [*edges, *[12] * (size - 2)]
        out = torch.zeros(bounds[rank + 1] - bounds[rank])
        collectives.reduce_scatter_parts(
            [(offset, torch.ones(12 - offset)), (0, torch.ones(offset))], bounds, out
        ).wait()

    return call


def _gather(bounds, dtype=torch.float32):
    return lambda _rank, size: collectives.all_gather(torch.ones(12, dtype=dtype), [*bounds, *[12] * (size - 2)]).wait()


def _exchange(numel, dtype=torch.float32):
    """Each rank sends as many elements to each, and expects as many."""

    def call(_rank, size):
        edges = list(range(0, numel * size + 1, numel))
        out = torch.full((numel * size,), 0, dtype=dtype)
        collectives.all_to_all(torch.ones(numel * size, dtype=dtype), edges, out, edges).wait()

    return call


def _sends_more_to_rank_0(rank, size):
    """What the others expect comes, but not what rank 0 does: only rank 0 can see it."""
    edges = list(range(0, 2 * size + 1, 2))
    sent = [0, 5, *[edge + 3 for edge in edges[2:]]] if rank != 0 else edges
    collectives.all_to_all(torch.ones(sent[-1]), sent, torch.zeros(2 * size), edges).wait()


_MAX = dist.ReduceOp.MAX
_AVG = dist.ReduceOp.AVG
CALLS = {
    "formats of equal bytes": (_reduce(8, torch.float32), _reduce(16, torch.bfloat16)),
    "formats of one width": (_reduce(8, torch.float16), _reduce(8, torch.bfloat16)),
    "reductions": (_reduce(op=dist.ReduceOp.SUM), _reduce(op=_MAX)),
    "reductions of large tensors": (_reduce(20_000), _reduce(20_000, op=_AVG)),
    "lengths": (_reduce(8), _reduce(9)),
    "lengths of large tensors": (_reduce(20_000), _reduce(30_000)),
    "operations": (_reduce(12), _gather([0, 6, 12])),
    "splits of a gather": (_gather([0, 6, 12]), _gather([0, 5, 12])),
    "formats of a gather": (_gather([0, 6, 12]), _gather([0, 6, 12], torch.int32)),
    "splits of a sum": (_scatter([0, 6, 12]), _scatter([0, 7, 12])),
    "places of a sum": (_scatter([0, 6, 12], offset=4), _scatter([0, 6, 12], offset=8)),
    "lengths of an exchange": (_exchange(4), _exchange(5)),
    "formats of an exchange": (_exchange(4), _exchange(4, torch.int32)),
    "lengths that one rank sees": (_exchange(2), _sends_more_to_rank_0),
}


@matrix(["formats of equal bytes-2", "lengths-2", "splits of a sum-3"], case=CALLS, num_ranks=[2, 3])
def test_different_calls_raise_on_every_rank(case, num_ranks):
    raised = expect_on_ranks(
        RuntimeError, "the ranks call different collectives", different_calls, num_ranks, case, 1,
        group_timeout_seconds=20,
    )  # fmt: skip
    for rank, error in enumerate(raised):
        text = str(error).lower()
        assert "rank 1" in text, (rank, error)
        assert "rank 0" in text or "rank 2" in text, (rank, error)


def test_an_error_names_both_operations():
    raised = expect_on_ranks(RuntimeError, "differ", different_calls, 2, "formats of equal bytes", 1)
    for error in raised:
        assert "an all-reduce (SUM) of 32 bytes of torch.float32" in str(error)
        assert "an all-reduce (SUM) of 32 bytes of torch.bfloat16" in str(error)


@pytest.mark.parametrize(("system", "machine", "has"), [
    ("linux", "x86_64", True), ("linux", "aarch64", False), ("darwin", "x86_64", False), ("linux", "ppc64le", False),
])  # fmt: skip
def test_supported_only_on_x86_64_linux(monkeypatch, system, machine, has):
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert (memory._library() is not None) == has


def different_shapes():
    collectives.all_reduce(torch.ones(4 + dist.get_rank())).wait()


def test_different_shapes_raise_on_every_rank():
    expect_on_ranks(RuntimeError, "with different shapes", different_shapes, 2, group_timeout_seconds=5)


def dies():
    collectives.all_reduce(torch.ones(4)).wait()
    if dist.get_rank() == 1:
        os._exit(3)
    collectives.all_reduce(torch.ones(4)).wait()


def test_a_dead_rank_ends_the_others_wait():
    start = time.monotonic()
    with pytest.raises(RankDiedError):
        run_on_ranks(dies, 2, timeout_seconds=60)
    assert time.monotonic() - start < 60, "before the time limit of the call"


def held_after(rounds):
    process = psutil.Process()
    tensor = torch.ones(300_000)

    def use():
        for _ in range(rounds):
            group = dist.new_group()
            collectives.all_reduce(tensor, group=group).wait()
            collectives.all_reduce(tensor[:8].clone(), group=group).wait()
            dist.destroy_process_group(group)

    use()
    before = process.num_fds(), threading.active_count()
    use()
    return before, (process.num_fds(), threading.active_count())


def test_groups_that_are_destroyed_leave_no_files_or_threads():
    for before, after in run_on_ranks(held_after, 2, 5):
        assert after == before


def cannot_read(wish):
    """Take this rank's permission to read, if it is rank 1, and combine a tensor."""

    def refuses(*_):
        raise PermissionError

    reads = connection.read
    if dist.get_rank() == 1:
        connection.read = refuses
    os.environ["BOOSTER_TRANSPORT"] = wish
    try:
        group = dist.new_group()
        tensor = torch.ones(4)
        collectives.all_reduce(tensor, group=group).wait()
    finally:  # the process serves other tests
        connection.read = reads
    assert transport_of(group).name == "torch"
    assert torch.equal(tensor, torch.full((4,), 2.0))


def test_all_ranks_use_torch_if_one_may_not_read():
    run_on_ranks(cannot_read, 2, "auto")


def test_direct_was_required_and_one_rank_may_not_read():
    message = r"BOOSTER_TRANSPORT=direct, but rank 1 can't read the memory of ranks \[0\]"
    expect_on_ranks(ConfigError, message, cannot_read, 2, "direct")


def exchanges(lengths):
    """Each rank has a slice of another length for each other; a third of them is empty."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [0, *accumulate(lengths[rank][:size])]
    received = [0, *accumulate(lengths[peer][rank] for peer in range(size))]
    source = torch.arange(sent[-1]) + 1000 * rank
    expected = [1000 * peer + sum(lengths[peer][:rank]) + torch.arange(lengths[peer][rank]) for peer in range(size)]
    for group in map(group_over, ("torch", "direct")):
        out = torch.full((received[-1],), -1)
        collectives.all_to_all(source, sent, out, received, group).wait()
        assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_gets_the_slices_that_the_others_have_for_it(num_ranks):
    lengths = [[3, 0, 5, 7], [2, 4, 0, 1], [0, 9, 6, 0], [8, 1, 0, 2]]
    run_on_ranks(exchanges if num_ranks > 1 else exchanges_alone, num_ranks, lengths)


def exchanges_alone(lengths):
    source, out = torch.arange(float(lengths[0][0])), torch.zeros(lengths[0][0])
    collectives.all_to_all(source, [0, 3], out, [0, 3]).wait()
    assert torch.equal(out, source)
