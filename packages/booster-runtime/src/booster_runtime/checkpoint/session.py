"""What saving and loading share: who takes part, how ranks agree, whether they see one folder, and a progress bar."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from booster_core.ranks import this_host
from booster_runtime.checkpoint.save.writer import as_checkpoint_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from booster_core.ranks import DistCoordinator, Host

_LINGER_SECONDS = 10.0
_WRITE_TIMEOUT_SECONDS = 24 * 3600.0
"""How long ranks wait for each other's disks. That all take part is known by then; a rank that dies ends the run."""
_PATIENCE_SECONDS = 1.0


class Session:
    """How the ranks of one `CheckpointFiles` work together.

    Args:
        coordinator: Rank facts and rendezvous.
        timeout_seconds: How long a save or load waits for ranks that do not call it.

    Attributes:
        shared_storages: URLs of storages that all ranks are known to share.
    """

    def __init__(self, coordinator: DistCoordinator, *, timeout_seconds: float | None) -> None:
        self.coordinator = coordinator
        self.rank = coordinator.rank
        self.world_size = coordinator.world_size
        self._timeout_seconds = timeout_seconds
        self._group: tuple[Any, ProcessGroup] | None = None
        self._hosts: list[Host] = []
        self.shared_storages: set[str] = set()

    def begin(self, name: str, error: Exception | None = None) -> None:
        """Meet all ranks at the start of a call.

        Args:
            name: What the user called.
            error: What this rank has to report from before.

        Raises:
            MissingRanksError: If some ranks do not call within the time limit.

        Collective: every rank.
        """
        self.coordinator.raise_together(error, name=name, timeout_seconds=self._timeout_seconds)

    @contextmanager
    def together(self, name: str, path: Path, *, for_long: bool = False) -> Iterator[None]:
        """Run the body, then raise on every rank what it raised on any. The body contains no collectives.

        Only the store is used, so this serves threads too.

        Args:
            name: What the user called, and which step of it this is.
            path: What it works on.
            for_long: The body may write or read all of a checkpoint, and ranks wait for each other's disks.

        Collective: every rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - whatever happened here, the other ranks have to hear of it
            error = as_checkpoint_error(caught, path)
        limit = max(self.coordinator.timeout_seconds, _WRITE_TIMEOUT_SECONDS) if for_long else None
        self.coordinator.raise_together(error, name=name, timeout_seconds=limit)

    def gather(self, name: str, path: Path, work: Callable[[], Any], group: ProcessGroup | None = None) -> list[Any]:
        """Return what ``work`` returned on every rank, in rank order; raise on every rank what it raised on any.

        Args:
            name: What the user called.
            path: What it works on.
            work: Contains no collectives.
            group: The group to communicate in; the default group when ``None``.

        Collective: every rank.
        """
        error, value = None, None
        try:
            value = work()
        except Exception as caught:  # noqa: BLE001 - whatever happened here, the other ranks have to hear of it
            error = as_checkpoint_error(caught, path)
        gathered = self.coordinator.all_gather_object(
            (value, error is not None), process_group=group, name=f"{name} (gather)"
        )
        if any(has_failed for _, has_failed in gathered):
            self.coordinator.raise_together(error, name=name)
        return [entry for entry, _ in gathered]

    def hosts(self, group: ProcessGroup | None = None) -> list[Host]:
        """Return the host of each rank; asked for once.

        Args:
            group: The group to communicate in; the default group when ``None``.

        Collective: every rank, on its first call.
        """
        if not self._hosts:
            self._hosts = self.coordinator.all_gather_object(this_host(), process_group=group, name="tell hosts")
        return self._hosts

    def ranks_that_see(self, folder: Path, token: str, group: ProcessGroup | None = None) -> list[int]:
        """Return the ranks that see a file which rank 0 makes in a folder, and removes again.

        Args:
            folder: The folder.
            token: Text that no other save uses.
            group: The group to communicate in; the default group when ``None``.

        Collective: every rank. Ranks of one host are not asked: all see what rank 0 sees.
        """
        if len(set(self.hosts(group))) == 1:
            return list(range(self.world_size))
        probe = folder / f".booster-{token}.probe"
        with self.together("look for a folder", folder):
            if self.rank == 0:
                probe.touch()
        is_seen = False
        with suppress(OSError):
            # A network file system may show an old listing; opening a file asks the server.
            os.close(os.open(probe, os.O_RDONLY))
            is_seen = True
        seen = self.coordinator.all_gather_object(is_seen, process_group=group, name="look for a folder")
        if self.rank == 0:
            probe.unlink(missing_ok=True)
        return [rank for rank, sees in enumerate(seen) if sees]

    def linger(self, key: str) -> None:
        """Stay, on rank 0, until all ranks have read how a job in the background ended.

        The process of rank 0 may hold the store, and the interpreter may be about to end.

        Args:
            key: A key of the store that no other job uses.
        """
        from booster_core.ranks import current_world

        store = current_world().store
        if store is None or self.world_size == 1:
            return
        gone = store.add(key, 1)
        deadline = time.monotonic() + _LINGER_SECONDS
        while self.rank == 0 and gone < self.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = store.add(key, 0)
        if self.rank == 0:
            store.delete_key(key)

    def before_close(self, callback: Callable[[], None]) -> None:
        """Have something called before the process group is destroyed, once however often this is called."""
        from booster_core.ranks import current_world

        callbacks = current_world().at_close
        if callback not in callbacks:
            callbacks.append(callback)

    def cpu_group(self) -> ProcessGroup:
        """Return a group of all ranks on the CPU that nothing but checkpoints uses.

        Collective: every rank, on its first call under a process group.
        """
        import torch.distributed as dist

        world = dist.group.WORLD
        if self._group is None or self._group[0] is not world:
            # Ranks wait here for the disks of those that write.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_WRITE_TIMEOUT_SECONDS))
            self._group = (world, group)
        return self._group[1]


class Progress:
    """Counts bytes, and shows a bar once it has lasted more than a second. A context manager.

    Args:
        title: What is going on.
        total_bytes: Bytes that this rank expects to count.
        is_shown: Whether this rank may show a bar.
    """

    def __init__(self, title: str, total_bytes: int, *, is_shown: bool) -> None:
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._is_shown = is_shown
        self._start = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, nbytes: int) -> None:
        """Count bytes."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._is_shown and time.monotonic() - self._start > _PATIENCE_SECONDS and self._done < self._total:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=self._done, desc=self._title, unit="B", unit_scale=True, unit_divisor=1024
            )
