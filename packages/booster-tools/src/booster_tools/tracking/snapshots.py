"""`memory_snapshots`: who allocated what a GPU's memory holds, written when it is full or on request."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from booster_core.log import ANY_RANK, log
from booster_core.ranks import current_world

if TYPE_CHECKING:
    from collections.abc import Iterator


class MemorySnapshots:
    """Writes snapshots of torch's allocator; made by `memory_snapshots`.

    Attributes:
        paths: The files that were written so far.
    """

    def __init__(self, folder: Path, recorder: Any) -> None:
        self.paths: list[Path] = []
        self._folder = folder
        self._recorder = recorder

    def write(self, name: str | None = None) -> Path | None:
        """Write what the memory holds now and how it came to that, and return the file; ``None`` without a recorder.

        Args:
            name: Ends the file's name; by default the number of the snapshot.
        """
        if self._recorder is None:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = str(len(self.paths)) if name is None else name
        path = self._folder / f"memory-snapshot-rank{current_world().rank}-{name}.pickle"
        self._recorder._dump_snapshot(str(path))  # noqa: SLF001 - documented by torch under this name
        self.paths.append(path)
        return path


@contextlib.contextmanager
def memory_snapshots(folder: str | Path, *, max_entries: int = 100_000) -> Iterator[MemorySnapshots]:
    """Record each allocation of a ``with`` on a GPU; where it runs out of memory, write a snapshot for the viewer.

    pytorch.org/memory_viz shows ``memory-snapshot-rankN-oom.pickle``: each tensor with the lines that allocated it.
    Recording takes about 2 microseconds an allocation. Without a CUDA device (or ROCm's, or XPU), one line says that
    nothing is recorded.

    Example::

        with memory_snapshots("run") as snapshots:
            train()
            snapshots.write("after-training")

    Args:
        folder: Where to write, on each rank's host.
        max_entries: Number of the latest allocations to keep, about 1 KiB of host memory each.

    Collective: none; on the ranks that are to be recorded.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    memory = None if device is None else getattr(torch.get_device_module(device), "memory", None)
    recorder = memory if hasattr(memory, "_record_memory_history") else None
    snapshots = MemorySnapshots(Path(folder), recorder)
    if recorder is None:
        where = "the CPU" if device is None else f"devices of type '{device.type}'"
        log.warning("`memory_snapshots` records nothing: torch has no record of the allocations of %s.", where)
        yield snapshots
        return
    recorder._record_memory_history(max_entries=max_entries)  # noqa: SLF001 - as above
    try:
        yield snapshots
    except torch.OutOfMemoryError:  # its traceback still holds what the failed call had
        path = snapshots.write("oom")
        log.warning("Out of memory: %s says who holds it: see pytorch.org/memory_viz.", path, extra=ANY_RANK)
        raise
    finally:
        recorder._record_memory_history(enabled=None)  # noqa: SLF001 - as above
