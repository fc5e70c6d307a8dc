"""What copies between a device and its host, alone: values survive uses in any order, however late copies are."""

import random

import torch

from booster_gemini.memory.chunks import ChunkMemory
from booster_gemini.memory.disk import DiskStore
from booster_gemini.memory.ring import Ring
from booster_gemini.plan import Placement
from booster_runtime.memory import CopyStream
from booster_zero.engine import FlatBuffer, Role
from device_runs.cases import CannotRun, Case, Figure
from device_runs.parts import case_of
from device_runs.small import late_copies, spin

ROUNDS = 200
MAX_PINNED_RATIO = 1.1
"""Bytes of the host that are taken, to bytes that blocks need."""


def block_numel(setting):
    """Return the length of a block: 64 MB of fp32 on a real device."""
    return 1 << 24 if setting.is_real else 1 << 10


def assert_all(values, expected, what):
    """Compare every element of a tensor of the host with one number."""
    low, high = (float(each) for each in values.aminmax())
    assert low == high == expected, f"{what}: from {low} to {high} in place of {expected}"


class _Owner:
    """Somebody who has a buffer, as buckets have."""

    def __init__(self, memory, number, role, numel, device):
        self.expected = float(number)
        self.buffer = FlatBuffer(number, role, torch.full((numel,), self.expected, device=device))
        memory.add(self.buffer)

    def look(self, device, *, changes):
        """Return how many values are wrong, and change all; the buffer is in use."""
        values = self.buffer.tensor
        assert values.device.type == device
        found = (values != self.expected).sum()
        if changes:
            values.add_(1)
            self.expected += 1
        return found


def _write_from_host(memory, owner, numel, draw):
    """Write to a buffer from values on the host, and change these once that is said to be safe."""
    owner.expected += 1
    values = torch.full((numel,), owner.expected, pin_memory=True)
    sent = memory.write(owner.buffer, values)
    if draw.random() < 0.5:
        sent.wait()
        values.fill_(-1.0)


def move_blocks(setting, *, policy, has_disk):
    """Use buffers on the device, and write to them from the host, in random order, and check what each use finds."""
    numel, draw = block_numel(setting) // (4 if has_disk else 1), random.Random(7)
    device, count, num_bytes = torch.device(setting.device), 12, 4 * numel
    placement = Placement(away=dict.fromkeys(Role, 1.0), ahead=dict.fromkeys(Role, 2))
    if policy == "auto":
        placement = Placement(budget_bytes=5 * num_bytes)
    memory = ChunkMemory(device, placement, DiskStore(setting.folder) if has_disk else None, pins=True)
    owners = [_Owner(memory, number, Role.PARAM, numel, setting.device) for number in range(count)]
    wrong = torch.zeros(count, dtype=torch.int64, device=device)
    with late_copies(setting, seconds=1e-3):
        for turn in range(ROUNDS):
            owner = draw.choice(owners)
            if draw.random() < 0.3:
                _write_from_host(memory, owner, numel, draw)
                continue
            used = {owner, draw.choice(owners)}
            for each in used:
                memory.fetch(each.buffer).wait()
            changes = draw.random() < 0.6
            for each in used:
                if draw.random() < 0.3:
                    spin(setting, draw.random() * 3e-3)
                wrong[each.buffer.key[0]] += each.look(setting.device, changes=changes)
            for each in used:
                memory.release(each.buffer, changed=changes)
            if turn % 20 == 19:
                memory.end_step()
                assert memory.problem() is None
    found = wrong.tolist()
    assert not any(found), f"values that were wrong on the device, by block: {found}"
    memory.close()


def hold_pinned_bytes(setting):
    """Host memory that blocks of many sizes take is what they need, and little more."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        msg = "torch.cuda.host_memory_stats"
        raise CannotRun(msg)
    torch.empty(1, device=setting.device)
    host = Ring(torch.device("cpu"), pins=True)
    before = _host_bytes()
    sizes = [(1 << 26), (1 << 26) - 4096, 33 << 20, 17 << 20, (5 << 20) + 12, 1 << 20]
    taken = [(host.take(size), size) for size in sizes]
    for buffer, size in taken:
        assert buffer.is_pinned(), f"{size} bytes are not page-locked"
        assert buffer[4096:8192].is_pinned()
        assert buffer.data_ptr() % 4096 == 0
        assert buffer.numel() >= size
    counted = _host_bytes() - before
    print(f"by torch's allocator: {counted}")
    asked = sum(sizes)
    held = max(counted, sum(buffer.untyped_storage().nbytes() for buffer, _ in taken))
    return [Figure("pinned memory of blocks", [held], "bytes of blocks", [asked], unit="B", bar=MAX_PINNED_RATIO)]


def _host_bytes():
    stats = torch.cuda.host_memory_stats()
    found = [stats[name] for name in ("allocated_bytes.current", "reserved_bytes.current") if name in stats]
    assert found, sorted(stats)
    return max(found)


def share_streams(setting):
    """Copy streams that are the same to torch, which has 32 of them, order copies all the same."""
    device = torch.device(setting.device)
    streams = [CopyStream(device) for _ in range(70)]
    numel = block_numel(setting) >> 2
    source = torch.zeros(numel, device=device)
    host = torch.empty(numel, pin_memory=True)
    for number, stream in enumerate(streams):
        source.fill_(float(number))
        with stream.after_compute():
            spin(setting, 3e-4)
            host.copy_(source, non_blocking=True)
            arrived = stream.record()
        if arrived is not None:
            torch.accelerator.current_stream(device).wait_event(arrived)
            arrived.synchronize()
        assert_all(host, float(number), f"stream {number}")


CASES = [
    case_of(
        "streams",
        [
            *(
                Case(f"blocks, {policy}{', disk' if disk else ''}", move_blocks, {"policy": policy, "has_disk": disk})
                for policy, disk in (("static", False), ("auto", False), ("auto", True))
            ),
            Case("seventy copy streams", share_streams),
            Case("pinned memory", hold_pinned_bytes, only_on="cuda"),
        ],
    ),
]
