"""The backend by which several ranks share a device: its order, its errors, and what it refuses."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import device_smoke
import pytest
import torch
import torch.distributed as dist
from device_runs import staged, two_ranks
from device_runs.cases import Setting
from simulated_device import NAME, load
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from booster_testing import run_on_ranks

BACKEND = f"cpu:gloo,{NAME}:staged"


def prepare(library):
    load(library)
    staged.register(NAME)


def run(function, world_size, library, *args):
    return run_on_ranks(function, world_size, *args, backend=BACKEND, prepare=partial(prepare, library))


def setting():
    return Setting(NAME, BACKEND, dist.get_rank(), dist.get_world_size(), Path())


def move_and_reduce():
    two_ranks.collectives(setting())


def coalesce():
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = [torch.full((3,), rank + 1.0, device=NAME) for _ in range(2)]
    with _coalescing_manager(async_ops=True) as works:
        for each in ones:
            dist.all_reduce(each)
    works.wait()
    parts = [torch.full((2,), float(rank), device=NAME), torch.full((3,), float(rank), device=NAME)]
    wholes = [torch.empty(size * part.numel(), device=NAME) for part in parts]
    with _coalescing_manager(device=torch.device(NAME)):
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather([*whole.chunk(size)], part)
    total = functional.all_reduce(parts[0] + 1, "sum", dist.group.WORLD)
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # before torch 2.13
    whole = gather(parts[0], 0, dist.group.WORLD)
    ones += [total.mul(1), whole.mul(1)]
    return [each.tolist() for each in ones], [each.tolist() for each in wholes]


def work_in_a_group_of_two():
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    tensor = torch.full((2,), float(dist.get_rank()), device=NAME)
    dist.all_reduce(tensor, group=group)
    on_cpu = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(on_cpu, group=group)
    return tensor.tolist(), on_cpu.tolist(), group.name(), dist.get_backend_config(group)


def use_without_waiting():
    """Return what is raised where the result is used, or where the device's copy finds that it has been used."""
    tensor = torch.ones(4, device=NAME)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(RuntimeError) as raised:
        _double_then_wait(tensor, work)
    return str(raised.value)


def _double_then_wait(tensor, work):
    tensor.mul(2)
    work.wait()


def receive_before_sending():
    """Return what is raised, after how many seconds, and what the group raises from then on."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    other = 1 - dist.get_rank()
    tensor, room = torch.ones(4, device=NAME), torch.empty(4, device=NAME)
    begin = time.monotonic()
    first = dist.irecv(room, group=group, group_src=other)
    dist.isend(tensor, group=group, group_dst=other)
    with pytest.raises(RuntimeError) as raised:
        first.wait()
    seconds = time.monotonic() - begin
    with pytest.raises(RuntimeError) as later:
        dist.all_reduce(tensor, group=group)
    return str(raised.value), seconds, str(later.value)


def exchange_in_a_batch():
    other = 1 - dist.get_rank()
    tensor, room = torch.full((4,), float(dist.get_rank()), device=NAME), torch.empty(4, device=NAME)
    listed = [dist.P2POp(dist.irecv, room, other), dist.P2POp(dist.isend, tensor, other)]
    for work in dist.batch_isend_irecv(listed):
        work.wait()
    return room.tolist()


def ask_for_too_much():
    tensor = torch.ones(4, 4, device=NAME)
    asked = {
        "contiguous": lambda: dist.all_reduce(tensor.t()),
        "no data type": lambda: dist.all_reduce(tensor.short()),
        "of simulated, or all of the CPU": lambda: dist.all_gather([torch.ones(4, 4), tensor], tensor),
        "must be equal to world_size times": lambda: two_ranks._call("all_gather_single", "all_gather_into_tensor")(
            torch.ones(7, device=NAME), tensor
        ),
        "from any rank": lambda: dist.recv(tensor),
        "to itself": lambda: dist.group.WORLD.send([tensor], dist.get_rank(), 0),
        "new_group": lambda: dist.group.WORLD.split_group([0, 1]),
    }
    said = {}
    for part, call in asked.items():
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call()
        said[part] = str(raised.value)
    dist.all_reduce(tensor)  # a refusal leaves the group as it was
    return said, tensor.sum().item()


def train(folder):
    device_smoke.train(device_smoke.CASES["zero 2"], NAME, "bf16", folder)


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_equal_what_gloo_gathers(world_size, simulated_device):
    run(move_and_reduce, world_size, simulated_device)


def test_calls_can_be_coalesced_and_functional(simulated_device):
    expected = ([*[[3.0] * 3] * 2, [3.0] * 2, [0.0] * 2 + [1.0] * 2], [[0.0] * 2 + [1.0] * 2, [0.0] * 3 + [1.0] * 3])
    assert run(coalesce, 2, simulated_device) == [expected, expected]


def test_new_groups_have_both_backends(simulated_device):
    first, second, third = run(work_in_a_group_of_two, 3, simulated_device)
    assert second is None
    assert first == third == ([2.0, 2.0], [2.0, 2.0], "staged", f"cpu:gloo,{NAME}:staged")


def test_results_are_unordered_before_wait(simulated_device):
    for said in run(use_without_waiting, 2, simulated_device):
        assert "race on the simulated device" in said


def test_messages_run_in_the_order_of_their_calls(simulated_device):
    """Two ranks that both receive first would wait for ever, as with NCCL that connects eagerly."""
    for raised, seconds, later in run(receive_before_sending, 2, simulated_device):
        assert "staged: receive from" in raised
        assert 1 < seconds < 20
        assert "staged: receive from" in later


def test_a_batch_of_messages_starts_together(simulated_device):
    assert run(exchange_in_a_batch, 2, simulated_device) == [[1.0] * 4, [0.0] * 4]


def test_what_nccl_refuses_is_refused(simulated_device):
    for said, total in run(ask_for_too_much, 2, simulated_device):
        assert all(part in text for part, text in said.items()), said
        assert total == 32


def test_training_over_it_equals_one_process(simulated_device, tmp_path):
    run(train, 2, simulated_device, str(tmp_path))
