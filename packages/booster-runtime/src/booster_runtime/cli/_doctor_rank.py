"""One of the two processes that ``booster doctor`` starts: tries each collective, and prints JSON lines around it.

Run as ``python -m booster_runtime.cli._doctor_rank RANK WORLD_SIZE BACKEND FOLDER PORT``. The line before a check tells
the parent which one hangs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import booster_core
from booster_core.errors import ConfigError
from booster_runtime.cli._doctor_speed import Measured, SpeedChecks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

NUMEL = 1 << 14
"""Elements of each buffer: enough to leave a backend's path for tiny messages."""


class Checks:
    """The checks of one rank.

    Args:
        device: Where buffers are allocated.
        folder: A folder that all ranks see.

    Collective: each check, both ranks.
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
        yield from SpeedChecks(self.device, self.folder)

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
        gathered = torch.empty(self.world_size * NUMEL, dtype=dtype, device=self.device)
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
        path, part = self.folder / "together.bin", bytes([self.rank]) * NUMEL
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, part, self.rank * NUMEL)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        dist.all_reduce(self._filled(0, torch.float32))
        expected = b"".join(bytes([rank]) * NUMEL for rank in range(self.world_size))
        _require(path.read_bytes() == expected, f"'{path}' does not hold what the ranks wrote")

    def _filled(self, value: int, dtype: torch.dtype) -> Tensor:
        return torch.full((NUMEL,), value, dtype=dtype, device=self.device)

    def _expect(self, buffer: Tensor, value: int) -> None:
        _require(bool((buffer == value).all()), f"expected {value} everywhere, got {sorted(set(buffer.tolist()))}")


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - reads as the claim it is
    if not holds:
        raise ValueError(message)


def _say(check: str, state: str, detail: str = "") -> None:
    print(json.dumps({"check": check, "state": state, "detail": detail}), flush=True)  # noqa: T201 - the parent reads it


def _attempt(name: str, check: Callable[[], Measured | None]) -> bool:
    _say(name, "started")
    try:
        measured = check()
    except ConfigError as error:
        _say(name, "missing", str(error))
        return True  # what is optional is missing on every rank
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is what the parent reports
        _say(name, "failed", f"{type(error).__name__}: {error}")
        return False
    if measured is None:
        _say(name, "ok")
    else:
        _say(name, "slow" if measured.is_slow else "ok", measured.text)
    return True


def main(rank: int, world_size: int, backend: str, folder: Path, port: int) -> int:
    """Launch as a script does, try each check, and return the exit status.

    Collective: every rank that the parent started.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")

    def launch() -> None:
        try:
            booster_core.launch(
                rank, world_size, "127.0.0.1", port, backend, rank, seed=None, verbose=False, timeout_seconds=30.0
            )
        except ConfigError as error:
            raise ValueError(str(error)) from error  # nothing works without it

    # After a failure the ranks may be out of step, so that what follows would tell nothing.
    if not _attempt("launch", launch):
        return 1
    return 0 if all(_attempt(name, check) for name, check in Checks(device, folder)) else 1


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
    sys.stdout.flush()
    # Threads of a backend whose collective failed may never end.
    os._exit(status)
