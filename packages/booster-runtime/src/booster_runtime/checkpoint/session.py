"""What saving and loading share: who takes part, how ranks agree, and whether they see the same disk."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from booster_core.errors import CheckpointError
from booster_core.ranks import this_host
from booster_runtime.checkpoint.save.job import TOKEN_CHARACTERS, as_checkpoint_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from booster_core.ranks import DistCoordinator, Host

_LINGER_SECONDS = 10.0
_WRITE_TIMEOUT_SECONDS = 24 * 3600.0
"""How long ranks wait for each other's disks. That all take part is known by then; a rank that dies ends the run."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """How values reach the files.

    Args:
        is_shared: Every rank sees the folder and writes there itself; otherwise rank 0 writes for all.
        one_host: All ranks run on one host.
    """

    is_shared: bool
    one_host: bool


class Session:
    """How the ranks of one `CheckpointFiles` work together.

    Args:
        coordinator: Rank facts and rendezvous.
        shared_filesystem: Whether all ranks see the same files; found out by a try when ``None``.
        timeout_seconds: How long a save or load waits for ranks that do not call it.
    """

    def __init__(
        self, coordinator: DistCoordinator, *, shared_filesystem: bool | None, timeout_seconds: float | None
    ) -> None:
        self.coordinator = coordinator
        self._shared_filesystem = shared_filesystem
        self._timeout_seconds = timeout_seconds
        self._group: tuple[Any, ProcessGroup] | None = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self.coordinator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.coordinator.world_size

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
    def together(self, name: str, path: Path) -> Iterator[None]:
        """Run the body, then raise on every rank what it raised on any. The body contains no collectives.

        Collective: every rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - whatever happened here, the other ranks have to hear of it
            error = as_checkpoint_error(caught, path)
        self.coordinator.raise_together(error, name=name)

    def agree(self, name: str) -> Callable[[str, Exception | None], None]:
        """Return the way in which a write job's steps agree; it uses the store only, and so serves threads."""

        def agree(step: str, error: Exception | None) -> None:
            limit = max(self.coordinator.timeout_seconds, _WRITE_TIMEOUT_SECONDS)
            self.coordinator.raise_together(error, name=f"{name} ({step})", timeout_seconds=limit)

        return agree

    def exchange(self, name: str, token: str) -> Callable[[str, Exception | None, str], list[str]]:
        """Return the way in which a write job's ranks give rank 0 a text each; over the store only."""
        from booster_core.ranks import current_world

        store, agree = current_world().store, self.agree(name)

        def exchange(step: str, error: Exception | None, text: str) -> list[str]:
            if store is None or self.world_size == 1:
                agree(step, error)
                return [text]
            keys = [f"checkpoint/{token}/{rank}" for rank in range(self.world_size)]
            store.set(keys[self.rank], text)
            agree(step, error)
            if self.rank != 0:
                return []
            texts = [store.get(key).decode() for key in keys]
            for key in keys:
                store.delete_key(key)
            return texts

        return exchange

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

    def prepare_folder(self, folder: Path, group: ProcessGroup | None = None) -> tuple[str, Callable[[], None]]:
        """Make a folder on rank 0, and leave a token there that the others can look for.

        Args:
            folder: The folder.
            group: The group to communicate in; the default group when ``None``.

        Returns:
            The token; and a function that undoes what was made here, to be called after a failure.

        Raises:
            CheckpointError: On every rank, if the folder cannot be made.

        Collective: every rank.
        """
        token, problem, made = "", "", []
        if self.rank == 0:
            token = secrets.token_hex(TOKEN_CHARACTERS // 2)
            try:
                made = [path for path in (folder, *folder.parents) if not path.exists()]
                folder.mkdir(parents=True, exist_ok=True)
                if self.world_size > 1:
                    self._probe(folder, token).touch()
            except OSError as error:
                problem = str(as_checkpoint_error(error, folder))
        token, problem = self.coordinator.broadcast_object((token, problem), process_group=group, name="make a folder")
        if problem:
            raise CheckpointError(problem)

        def undo() -> None:
            with suppress(OSError):
                self._probe(folder, token).unlink(missing_ok=True)
            for path in made:
                with suppress(OSError):
                    path.rmdir()

        return token, undo

    def look_for_token(self, folder: Path, token: str) -> tuple[bool, Host]:
        """Return whether this rank sees rank 0's token, and its host.

        Collective: none.
        """
        if self.world_size == 1:
            return True, this_host()
        with suppress(OSError):
            # A network file system may show an old listing; opening a file asks the server.
            os.close(os.open(self._probe(folder, token), os.O_RDONLY))
            return True, this_host()
        return False, this_host()

    def choose_route(self, folder: Path, token: str, seen: list[tuple[bool, Host]]) -> Route:
        """Return how values reach the files of a folder.

        Args:
            folder: The folder.
            token: Its token, which rank 0 removes.
            seen: What `look_for_token` returned on each rank.
        """
        if self.rank == 0 and self.world_size > 1:
            self._probe(folder, token).unlink(missing_ok=True)
        one_host = len({host for _, host in seen}) == 1
        is_shared = all(is_seen for is_seen, _ in seen)
        if self._shared_filesystem is not None:
            if self._shared_filesystem and not is_shared:
                blind = [rank for rank, (is_seen, _) in enumerate(seen) if not is_seen]
                msg = (
                    f"`shared_filesystem=True`, but ranks {blind[:10]} do not see what rank 0 wrote into '{folder}'. "
                    "Save to a folder that all hosts share, or leave `shared_filesystem` out."
                )
                raise CheckpointError(msg)
            is_shared = self._shared_filesystem
        return Route(is_shared=is_shared, one_host=one_host)

    def linger(self, token: str) -> None:
        """Stay, on rank 0, until all ranks have read how a job in the background ended.

        The process of rank 0 may hold the store, and the interpreter may be about to end.
        """
        from booster_core.ranks import current_world

        store = current_world().store
        if store is None or self.world_size == 1:
            return
        key = f"checkpoint/{token}/left"
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
            # A rank waits here while rank 0 writes for all others.
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_WRITE_TIMEOUT_SECONDS))
            self._group = (world, group)
        return self._group[1]

    @staticmethod
    def _probe(folder: Path, token: str) -> Path:
        return folder / f".booster-{token}.probe"
