"""What copies between a device and its host, alone: values survive uses in any order, however late copies are."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from booster_gemini.memory.buffers import Buffers
from booster_gemini.memory.disk import DiskStore
from booster_gemini.memory.ferry import Ferry
from booster_gemini.memory.on_device import DeviceHome
from booster_gemini.placement.auto import AutoPlacement
from booster_gemini.placement.static import StaticPlacement
from booster_runtime.memory import CopyStream
from booster_zero.engine import Role
from device_runs.cases import CannotRun, Case, Figure
from device_runs.small import late_copies, spin

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from device_runs.cases import Setting

ROUNDS = 200
MAX_PINNED_RATIO = 1.1
"""Bytes of the host that are taken, to bytes that blocks need."""


def block_numel(setting: Setting) -> int:
    """Return the length of a block: 64 MB of fp32 on a real device."""
    return 1 << 24 if setting.is_real else 1 << 10


def carry(setting: Setting, *, seed: int) -> None:
    """Bring blocks up, compute with them, and send them down, in random order and at random lateness."""
    numel, draw = block_numel(setting), random.Random(seed)
    device = torch.device(setting.device)
    ferry = Ferry(device)
    room, host = Buffers(device, copy_stream=ferry.up), Buffers(torch.device("cpu"), pins=True)
    num_bytes = 4 * numel
    below: list[Tensor] = [host.take(num_bytes) for _ in range(6)]
    expected = [float(index) for index in range(len(below))]
    copied: list[Any] = [None] * len(below)
    for buffer, value in zip(below, expected, strict=True):
        buffer[:num_bytes].view(torch.float32).fill_(value)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def sometimes_late(where: Callable[[], Any] | None = None) -> None:
        if draw.random() < 0.5:
            if where is None:
                spin(setting, draw.random() * 2e-3)
            else:
                with where():
                    spin(setting, draw.random() * 2e-3)

    for _ in range(ROUNDS):
        index = draw.randrange(len(below))
        buffer = room.take(num_bytes)
        sometimes_late(ferry.up.own_order)
        # Memory of the host that is still being filled is read by the device only, which orders both.
        if copied[index] is not None:
            ferry.up.wait(copied[index])
        ready = ferry.bring(buffer, below[index][:num_bytes])
        if draw.random() < 0.8:
            if ready is not None:
                ready.wait()
            values = buffer.view(torch.float32)
            sometimes_late()
            wrong += (values != expected[index]).sum()
            values += 1
            expected[index] += 1
            ready = None
            sometimes_late()
        sometimes_late(ferry.down.own_order)
        copied[index] = ferry.send(below[index][:num_bytes], buffer, ready)
        ferry.leave(buffer)
        room.give(buffer, num_bytes)
        values = None
        if draw.random() < 0.1:
            if copied[index] is not None:
                copied[index].synchronize()
            seen = below[index][:num_bytes].view(torch.float32).unique().tolist()
            assert seen == [expected[index]], (index, seen, expected[index])
    ferry.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} values were wrong on the device"
    for index, buffer in enumerate(below):
        seen = buffer[:num_bytes].view(torch.float32).unique().tolist()
        assert seen == [expected[index]], (index, seen, expected[index])


class _Owner:
    """Somebody whose tensor is a block, as chunks are."""

    def __init__(self, home: DeviceHome, number: int, role: Role, numel: int, device: str) -> None:
        self.home, self.key, self.expected = home, (number, role), float(number)
        self.flat: Tensor | None = None
        home.add(self.key, torch.full((numel,), self.expected, device=device), self.rebind)

    def rebind(self, flat: Tensor | None) -> None:
        self.flat = flat


def move_blocks(setting: Setting, *, policy: str, has_disk: bool) -> None:
    """Use blocks of a home on the device and on the host in random order, and check what each use finds."""
    numel, draw = block_numel(setting) // (4 if has_disk else 1), random.Random(7)
    device, count, num_bytes = torch.device(setting.device), 12, 4 * numel
    ferry = Ferry(device)
    budget = 5 * num_bytes if policy == "auto" else None
    store = DiskStore(setting.folder) if has_disk else None
    rooms = [
        Buffers(device, budget, copy_stream=ferry.up),
        Buffers(torch.device("cpu"), 3 * num_bytes if has_disk else None, pins=True),
    ]
    made: Any = AutoPlacement()
    if policy == "static":
        fractions = dict.fromkeys(Role, 1.0)
        made = StaticPlacement(fractions, class_of=lambda key: key[1], ahead=dict.fromkeys(Role, 2))
    home = DeviceHome(rooms, store, made, ferry=ferry)
    owners = [_Owner(home, number, Role.PARAM, numel, setting.device) for number in range(count)]
    wrong = torch.zeros(count, dtype=torch.int64, device=device)
    on_host = 0
    with late_copies(setting, 1e-3):
        for turn in range(ROUNDS):
            owner = draw.choice(owners)
            below = home.use_below(owner.key) if draw.random() < 0.3 else None
            if below is not None:
                on_host += 1
                seen = below.unique().tolist()
                assert seen == [owner.expected], (turn, owner.key, seen, owner.expected)
                below += 1
                owner.expected += 1
                home.release_below(owner.key)
            else:
                other = draw.choice(owners)
                for each in {owner, other}:
                    home.fetch(each.key).wait()
                changes = draw.random() < 0.6
                for each in {owner, other}:
                    if draw.random() < 0.3:
                        spin(setting, draw.random() * 3e-3)
                    assert each.flat is not None
                    assert each.flat.device.type == setting.device
                    wrong[each.key[0]] += (each.flat != each.expected).sum()
                    if changes:
                        each.flat.add_(1)
                        each.expected += 1
                for each in {owner, other}:
                    home.release(each.key, changed=changes)
            if turn % 20 == 19:
                home.end_step()
                assert home.problem() is None
    found = wrong.tolist()
    assert not any(found), f"values that were wrong on the device, by block: {found}"
    assert on_host or has_disk or policy == "auto", "nothing was used on the host"
    home.close()


def hold_pinned_bytes(setting: Setting) -> list[Figure]:
    """Host memory that blocks of many sizes take is what they need, and little more."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        msg = "torch.cuda.host_memory_stats"
        raise CannotRun(msg)
    torch.empty(1, device=setting.device)
    host = Buffers(torch.device("cpu"), pins=True)
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


def _host_bytes() -> int:
    stats = torch.cuda.host_memory_stats()
    found = [stats[name] for name in ("allocated_bytes.current", "reserved_bytes.current") if name in stats]
    assert found, sorted(stats)
    return max(found)


def share_streams(setting: Setting) -> None:
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
        assert host.unique().tolist() == [float(number)]


CASES = [
    *(Case(f"streams: blocks up and down, {seed}", carry, {"seed": seed}) for seed in (1, 2)),
    *(
        Case(
            f"streams: a home of blocks, {policy}{', disk' if disk else ''}",
            move_blocks,
            {"policy": policy, "has_disk": disk},
        )
        for policy, disk in (("static", False), ("auto", False), ("auto", True))
    ),
    Case("streams: pinned memory that blocks take", hold_pinned_bytes, only_on="cuda"),
    Case("streams: seventy copy streams", share_streams),
]
