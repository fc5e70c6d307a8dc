"""The simulated accelerator's collectives: NCCL's results, and NCCL's rules."""

import time

import pytest
import torch
import torch.distributed as dist
from simulated_device import NAME, lazy_communicators, run_on_devices

from booster_testing import RankError


def _full(numel, value, dtype=torch.float32):
    return torch.full((numel,), float(value), device=NAME, dtype=dtype)


def _results():
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        tensor = _full(5, rank + 1)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        found[name] = tensor.tolist()
    root = _full(2, rank + 1)
    dist.reduce(root, 1)
    found["reduce"] = root.tolist() if rank == 1 else None
    parts = [_full(length, 0) for length in (1, 2, 3)]
    dist.all_gather(parts, _full(rank + 1, rank))
    found["uneven gather"] = [part.tolist() for part in parts]
    own = _full(rank + 1, 0)
    dist.reduce_scatter(own, [_full(length, length * (rank + 1)) for length in (1, 2, 3)])
    found["uneven reduce-scatter"] = own.tolist()
    out = _full(6, 0)
    dist.all_to_all_single(out, torch.arange(6.0, device=NAME) + 10 * rank, [2] * size, [2] * size)
    found["all-to-all"] = out.tolist()
    received = _full(2, 0)
    operations = [
        dist.P2POp(dist.isend, _full(2, rank), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["ring"] = received.tolist()
    half = _full(1, 40000, torch.float16)
    dist.all_reduce(half)
    found["fp16 sum"] = half.item()
    half = _full(1, 40000, torch.float16)
    dist.all_reduce(half, dist.ReduceOp.AVG)
    found["fp16 average"] = half.item()
    return found


def test_results_are_those_of_nccl(simulated_device):
    for rank, found in enumerate(run_on_devices(_results, 3, simulated_device)):
        assert [found[name][0] for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")] == [6.0, 2.0, 3.0, 1.0, 6.0]
        assert found["reduce"] == ([6.0, 6.0] if rank == 1 else None)
        assert found["uneven gather"] == [[0.0], [1.0] * 2, [2.0] * 3]
        assert found["uneven reduce-scatter"] == [6.0 * (rank + 1)] * (rank + 1)
        assert found["all-to-all"] == [10.0 * peer + 2 * rank + k for peer in range(3) for k in range(2)]
        assert found["ring"] == [float((rank - 1) % 3)] * 2
        assert found["fp16 sum"] == float("inf"), "rounded after each addition"
        assert found["fp16 average"] == pytest.approx(40000, rel=2e-3)


def _refusals():
    group = dist.new_group(backend="simccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device=NAME)[:, ::2])
    with pytest.raises(RuntimeError, match="no data type for Short"):
        dist.all_reduce(torch.ones(1, device=NAME, dtype=torch.int16))
    with pytest.raises(RuntimeError, match="world_size times input"):
        dist.distributed_c10d._get_default_group()._allgather_base(_full(5, 0), _full(2, 0))


def test_what_nccl_refuses_is_refused(simulated_device):
    run_on_devices(_refusals, 2, simulated_device)


def _order_of_streams():
    tensor = _full(4, 1)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(RuntimeError, match=r"race .* on stream 0 reads memory that a collective"):
        tensor.sum()
    side = torch.Stream(NAME)
    with side:
        work.wait()
        total = tensor.sum()  # `wait` lets the current stream wait
    with pytest.raises(RuntimeError, match="race"):
        tensor.sum()  # but no other
    torch.simulated.current_stream().wait_stream(side)
    return total.item(), tensor.sum().item()


def test_a_collective_is_ordered_on_the_stream_that_waits(simulated_device):
    assert run_on_devices(_order_of_streams, 2, simulated_device) == [(8.0, 8.0)] * 2


def _first_message(group):
    rank = dist.get_rank()
    dist.barrier()
    times = []
    for _ in range(2):
        if rank == 1:
            time.sleep(0.5)
        start = time.monotonic()
        call, peer = (dist.isend, 1) if rank == 0 else (dist.irecv, 0)
        work = call(_full(1, 0), peer, group=group)
        times.append(time.monotonic() - start)
        work.wait()
        dist.barrier()
    return times


def _first_message_of_lazy_communicators():
    with lazy_communicators():
        group = dist.new_group()
    return _first_message(group)


def test_the_host_blocks_at_the_first_message_of_a_pair_where_communicators_are_lazy(simulated_device):
    (first, second), _ = run_on_devices(_first_message_of_lazy_communicators, 2, simulated_device)
    assert first > 0.4
    assert second < first / 2


def _through_one_communicator():
    """Let rank 1 ask rank 0 for a message that comes last, and send one to rank 2 meanwhile; return what arrived."""
    rank, device = dist.get_rank(), _full(1, 7)
    works = []
    if rank == 1:
        works += [dist.irecv(device, 0), dist.isend(_full(1, 5), 2)]
    if rank == 2:
        dist.recv(device, 1)
        dist.send(_full(1, 0), 0)
    if rank == 0:
        dist.recv(device, 2)
        dist.send(_full(1, 0), 1)
    for work in works:
        work.wait()


def test_messages_of_one_communicator_wait_for_those_asked_for_before(simulated_device):
    with pytest.raises(RankError, match=r"[Tt]imed out waiting|timeout caused"):
        run_on_devices(_through_one_communicator, 3, simulated_device, group_timeout_seconds=3.0)


def _two_ways_at_once():
    """Let both ranks send first: one communicator works off one message after the other."""
    rank = dist.get_rank()
    sent, received = dist.isend(_full(1, rank), 1 - rank), dist.irecv(_full(1, 0), 1 - rank)
    received.wait()
    sent.wait()


def _different_orders():
    rank = dist.get_rank()
    dist.all_reduce(_full(1, 0))
    calls = [lambda: dist.all_reduce(_full(1, rank)), lambda: dist.broadcast(_full(1, rank), 0)]
    for call in calls if rank == 0 else calls[::-1]:
        call()


@pytest.mark.parametrize("function", [_two_ways_at_once, _different_orders])
def test_calls_that_do_not_match_wait_until_the_time_limit(function, simulated_device):
    with pytest.raises(RankError, match=r"[Tt]imed out waiting|timeout caused"):
        run_on_devices(function, 2, simulated_device, group_timeout_seconds=2.0)
