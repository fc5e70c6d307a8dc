"""The checks that ``booster doctor`` makes on each of its ranks: that operations are right, and how fast some are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core import DistCoordinator
from booster_runtime import collectives
from booster_tools.cli._doctor_speed import Measured, delay_of, median_seconds, rate_of, with_free_space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

_NUMEL = 1 << 14
"""Elements of each buffer: enough to leave a backend's path for tiny messages."""
_TIMED_NUMEL = 1 << 20
"""Elements of each rank's buffer in fp32 where time is measured: 4 MiB."""


class Checks:
    """The checks of one rank.

    Args:
        device: Where buffers are allocated.
        folder: A folder that all ranks see.

    Collective: each check, every rank.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device = device
        self.folder = folder
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def __iter__(self) -> Iterator[tuple[str, Callable[[], Measured | None]]]:
        """Yield the name of each check and the check."""
        for dtype in (torch.float32, torch.bfloat16):
            for check in (self.all_reduce, self.all_to_all_single, self.broadcast, self.isend_irecv, self.all_gather):
                name = f"{check.__name__} {str(dtype).removeprefix('torch.')}"
                yield name, lambda check=check, dtype=dtype: check(dtype)  # type: ignore[misc]
        yield "broadcast_object_list", self.objects
        yield "all_gather_object", self.gathered_objects
        yield "write one file together", self.file
        yield "reduce-scatter", self.reduce_scatter
        yield "point to point, small messages", self.messages
        yield "store, meetings of all ranks", self.meetings
        yield "disk, writing", self.disk

    def all_reduce(self, dtype: torch.dtype) -> None:
        """Sum over the ranks."""
        buffer = self._filled(self.rank + 1, dtype)
        dist.all_reduce(buffer)
        self._expect(buffer, sum(range(1, self.world_size + 1)))

    def all_to_all_single(self, dtype: torch.dtype) -> None:
        """Exchange parts: our reduce-scatter uses it."""
        received = self._filled(-1, dtype)
        dist.all_to_all_single(received, self._filled(self.rank, dtype))
        for rank, part in enumerate(received.chunk(self.world_size)):
            self._expect(part, rank)

    def broadcast(self, dtype: torch.dtype) -> None:
        """Take over the last rank's values."""
        buffer = self._filled(self.rank, dtype)
        dist.broadcast(buffer, src=self.world_size - 1)
        self._expect(buffer, self.world_size - 1)

    def isend_irecv(self, dtype: torch.dtype) -> None:
        """Pass a buffer around: our all-gather on gloo and pipelines use it."""
        received = self._filled(-1, dtype)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        transfers = [
            dist.P2POp(dist.isend, self._filled(self.rank, dtype), after),
            dist.P2POp(dist.irecv, received, before),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        self._expect(received, before)

    def all_gather(self, dtype: torch.dtype) -> None:
        """Gather every rank's buffer."""
        gathered = torch.empty(self.world_size * _NUMEL, dtype=dtype, device=self.device)
        # torch 2.13 renames it and deprecates the old name, which is the only one before.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, self._filled(self.rank, dtype))
        for rank, part in enumerate(gathered.chunk(self.world_size)):
            self._expect(part, rank)

    def objects(self) -> None:
        """Broadcast a Python object."""
        received = [{"from": self.rank}]
        dist.broadcast_object_list(received, src=0, device=self.device)
        _require(received == [{"from": 0}], f"received {received}")

    def gathered_objects(self) -> None:
        """Gather Python objects."""
        received: list[object] = [None] * self.world_size
        dist.all_gather_object(received, ("rank", self.rank))
        _require(received == [("rank", rank) for rank in range(self.world_size)], f"received {received}")

    def file(self) -> None:
        """Write each rank's part of one file at its offset, and read the whole: checkpoints rely on it."""
        path, part = self.folder / "together.bin", bytes([self.rank]) * _NUMEL
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, part, self.rank * _NUMEL)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        DistCoordinator().block_all(name="doctor")  # on the host: NCCL's collectives return before they are done
        expected = b"".join(bytes([rank]) * _NUMEL for rank in range(self.world_size))
        _require(path.read_bytes() == expected, f"'{path}' does not hold what the ranks wrote")

    def reduce_scatter(self) -> Measured:
        """Sum gradients as the sharding strategies do."""
        bounds = [_TIMED_NUMEL * rank // self.world_size for rank in range(self.world_size + 1)]
        source = torch.full((_TIMED_NUMEL,), float(self.rank + 1), device=self.device)
        out = torch.empty(bounds[self.rank + 1] - bounds[self.rank], device=self.device)
        seconds = median_seconds(self.device, lambda: collectives.reduce_scatter(source, bounds, out).wait())
        expected = sum(range(1, self.world_size + 1))
        _require(bool((out == expected).all()), f"expected {expected} everywhere, got {sorted(set(out.tolist()))[:4]}")
        return rate_of(4 * _TIMED_NUMEL, seconds, "reduce-scatter")

    def messages(self) -> Measured:
        """Pass a small tensor on, as stages of a pipeline do."""
        sent, received = torch.ones(16, device=self.device), torch.zeros(16, device=self.device)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size

        def pass_on() -> None:
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
            ):
                work.wait()

        return delay_of(median_seconds(self.device, pass_on), "message")

    def meetings(self) -> Measured:
        """Let all ranks meet in the store, as errors on all ranks and the ends of saves do."""
        coordinator = DistCoordinator()
        return delay_of(median_seconds(self.device, lambda: coordinator.block_all(name="doctor")), "meeting")

    def disk(self) -> Measured:
        """Write a file to the disk itself, as checkpoints are."""
        content = os.urandom(4 * _TIMED_NUMEL)
        path = self.folder / f"disk-{self.rank}.bin"

        def write() -> None:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

        rate = rate_of(len(content), median_seconds(self.device, write), "disk")
        return with_free_space(rate, self.folder)

    def _filled(self, value: int, dtype: torch.dtype) -> Tensor:
        return torch.full((_NUMEL,), value, dtype=dtype, device=self.device)

    def _expect(self, buffer: Tensor, value: int) -> None:
        _require(bool((buffer == value).all()), f"expected {value} everywhere, got {sorted(set(buffer.tolist()))}")


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - reads as the claim it is
    if not holds:
        raise ValueError(message)
