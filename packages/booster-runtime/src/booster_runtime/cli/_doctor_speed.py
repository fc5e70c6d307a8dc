"""Checks of ``booster doctor`` that measure: both transports of collectives, point to point, the store, the disk.

Each is far below what any usable machine does before it is called slow; the figures are for comparing machines.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core import DistCoordinator
from booster_runtime import collectives
from booster_runtime.collectives.transports import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_NUMEL = 1 << 20
"""Elements of each rank's buffer in fp32: 4 MiB."""
_REPEATS = 5
_SLOWEST_BYTES_PER_SECOND = {"torch": 50e6, "direct": 100e6, "disk": 20e6}
_LONGEST_SECONDS = {"message": 5e-3, "meeting": 50e-3}
_LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Measured:
    """What a check found, and whether it is slow."""

    text: str
    is_slow: bool


class SpeedChecks:
    """The checks of one rank that measure.

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

    def __iter__(self) -> Iterator[tuple[str, Callable[[], Measured]]]:
        """Yield the name of each check and the check."""
        transports = ("torch",) if self.device.type == "cuda" else ("torch", "direct")
        for transport in transports:
            yield f"reduce-scatter, {transport} transport", lambda name=transport: self.reduce_scatter(name)  # type: ignore[misc]
        yield "point to point, small messages", self.messages
        yield "store, meetings of all ranks", self.meetings
        yield "disk, writing", self.disk

    def reduce_scatter(self, transport: str) -> Measured:
        """Sum gradients as the sharding strategies do.

        Raises:
            ConfigError: If the ranks can't use the transport; the message says why.
        """
        bounds = [_NUMEL * rank // self.world_size for rank in range(self.world_size + 1)]
        source = torch.full((_NUMEL,), float(self.rank + 1), device=self.device)
        out = torch.empty(bounds[self.rank + 1] - bounds[self.rank], device=self.device)
        with override(transport):
            seconds = self._median(lambda: collectives.reduce_scatter(source, bounds, out).wait())
        expected = sum(range(1, self.world_size + 1))
        if not bool((out == expected).all()):
            msg = f"expected {expected} everywhere, got {sorted(set(out.tolist()))[:4]}"
            raise ValueError(msg)
        return _rate(4 * _NUMEL, seconds, transport)

    def messages(self) -> Measured:
        """Pass a small tensor on, as stages of a pipeline do."""
        sent, received = torch.ones(16, device=self.device), torch.zeros(16, device=self.device)
        before, after = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size

        def pass_on() -> None:
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
            ):
                work.wait()

        return _delay(self._median(pass_on), "message")

    def meetings(self) -> Measured:
        """Let all ranks meet in the store, as errors on all ranks and the ends of saves do."""
        coordinator = DistCoordinator()
        return _delay(self._median(lambda: coordinator.rendezvous("doctor")), "meeting")

    def disk(self) -> Measured:
        """Write a file to the disk itself, as checkpoints are."""
        content = os.urandom(4 * _NUMEL)
        path = self.folder / f"disk-{self.rank}.bin"

        def write() -> None:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

        rate = _rate(len(content), self._median(write), "disk")
        free = shutil.disk_usage(self.folder).free
        return Measured(f"{rate.text}, {free / 2**30:.1f} GiB free", rate.is_slow or free < _LEAST_FREE_BYTES)

    def _median(self, call: Callable[[], None]) -> float:
        """Return the median seconds of a call, after one that is not timed."""
        seconds = []
        for _ in range(1 + _REPEATS):
            started = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - started)
        return sorted(seconds[1:])[_REPEATS // 2]


def _rate(nbytes: int, seconds: float, kind: str) -> Measured:
    rate = nbytes / seconds
    return Measured(f"{rate / 1e6:.0f} MB/s", rate < _SLOWEST_BYTES_PER_SECOND[kind])


def _delay(seconds: float, kind: str) -> Measured:
    return Measured(f"{seconds * 1e3:.2f} ms", seconds > _LONGEST_SECONDS[kind])
