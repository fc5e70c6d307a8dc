"""What saving and loading share: who takes part, how ranks agree, whether they see one folder, and how long it takes.

What ranks tell each other is mostly the same on all of them. So they compare digests first; what is equal everywhere
does not travel, and what some ranks have alike travels once.
"""

from __future__ import annotations

import os
import pickle
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import xxhash

from booster_checkpoint.storage.failures import as_checkpoint_error
from booster_core.log import log
from booster_core.ranks import this_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from booster_core.ranks import DistCoordinator, Host

_T = TypeVar("_T")
_LINGER_SECONDS = 10.0
_DISK_TIMEOUT_SECONDS = 3600.0
"""How long ranks wait for each other's disks. That all take part is known by then; a rank that dies ends the run."""
_SLOW_BYTES_PER_SECOND = 20e6
"""What a storage that all ranks write to, or read from, manages at least: larger checkpoints are waited for longer."""
_PATIENCE_SECONDS = 1.0


_Key = tuple[bytes, int]
"""A digest of a pickled value, and its size in bytes."""


def _key_of(content: bytes) -> _Key:
    return bytes(xxhash.xxh3_128_digest(content)), len(content)


def places_in_message(keys: Sequence[Sequence[_Key]]) -> dict[_Key, tuple[int, int]]:
    """Return, for each value that not all ranks have, the rank that sends it and where it begins in what all receive.

    Args:
        keys: The keys of every rank's values.

    Collective: none; the same on every rank.
    """
    holders: dict[_Key, int] = {}
    first: dict[_Key, int] = {}
    for rank, rank_keys in enumerate(keys):
        for key in set(rank_keys):
            holders[key] = holders.get(key, 0) + 1
        for key in rank_keys:
            first.setdefault(key, rank)
    places, used = {}, 0
    for key, rank in first.items():
        if holders[key] < len(keys):
            places[key] = rank, used
            used += key[1]
    return places


class Session:
    """How the ranks of one `CheckpointEngine` work together.

    Args:
        coordinator: Rank facts, and meetings of ranks.
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
        with self.coordinator.together(name, timeout_seconds=self._timeout_seconds):
            if error is not None:
                raise error

    @contextmanager
    def together(self, name: str, path: object, *, for_long: bool = False, nbytes: int = 0) -> Iterator[None]:
        """Run the body, then raise on every rank what it raised on any. The body contains no collectives.

        Only the store is used, so this serves threads too.

        Args:
            name: What the user called, and which step of it this is.
            path: What it works on.
            for_long: The body may write or read all of a checkpoint, and ranks wait for each other's disks.
            nbytes: How much that is, of all ranks together.

        Collective: every rank.
        """
        patience = _DISK_TIMEOUT_SECONDS + nbytes / _SLOW_BYTES_PER_SECOND
        limit = max(self.coordinator.timeout_seconds, patience) if for_long else None
        with self.coordinator.together(name, timeout_seconds=limit):
            try:
                yield
            except Exception as error:  # noqa: BLE001 - whatever happened here, the other ranks have to hear of it
                raise as_checkpoint_error(error, name, path)  # noqa: B904 - it may be the same error

    def gather(self, name: str, path: object, work: Callable[[], Any], group: ProcessGroup | None = None) -> list[Any]:
        """Return what ``work`` returned on every rank, in rank order; see `gather_each`.

        Collective: every rank.
        """
        return [entries[0] for entries in self.gather_each(name, path, lambda: [work()], group)]

    def gather_each(
        self, name: str, path: object, work: Callable[[], Sequence[Any]], group: ProcessGroup | None = None
    ) -> list[list[Any]]:
        """Return the entries that ``work`` returned on every rank, in rank order; raise what it raised on any rank.

        Entries that are equal to the byte when they are pickled are the same object in the result.

        Args:
            name: What the user called.
            path: What it works on.
            work: Contains no collectives. Returns as many entries on every rank.
            group: The group to communicate in; the default group when ``None``.

        Collective: every rank.
        """
        error, packed = None, list[bytes]()
        try:
            packed = [pickle.dumps(entry) for entry in work()]
        except Exception as caught:  # noqa: BLE001 - whatever happened here, the other ranks have to hear of it
            error = as_checkpoint_error(caught, name, path)
        own = dict(zip([_key_of(content) for content in packed], packed, strict=True))
        told = self.coordinator.all_gather_object(
            ([_key_of(content) for content in packed], error is not None), process_group=group, name=f"{name} (gather)"
        )
        if any(has_failed for _, has_failed in told):
            with self.coordinator.together(name):
                if error is not None:
                    raise error
        keys = [rank_keys for rank_keys, _ in told]
        travelling = places_in_message(keys)
        message = np.zeros(sum(size for _, size in travelling), dtype=np.uint8)  # each rank fills its places
        for key, (rank, start) in travelling.items():
            if rank == self.rank:
                message[start : start + key[1]] = np.frombuffer(own[key], dtype=np.uint8)
        self._add_up(torch.from_numpy(message), group)
        known = own | {key: message[start : start + key[1]].tobytes() for key, (_, start) in travelling.items()}
        values = {key: pickle.loads(content) for key, content in known.items()}  # noqa: S301 - of this run's own ranks
        return [[values[key] for key in rank_keys] for rank_keys in keys]

    def gather_to_first(self, value: _T, group: ProcessGroup | None = None) -> list[_T]:
        """Return what every rank passed, in rank order, on rank 0; an empty list elsewhere.

        Args:
            value: Pickled on the way.
            group: A group with a CPU backend; one of checkpoints' own when ``None``.

        Collective: every rank.
        """
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] | None = None if self.rank else [None] * self.world_size
        dist.gather_object(value, gathered, dst=0, group=group or self.cpu_group())
        return gathered or []

    def total_over_ranks(self, numbers: Sequence[int], group: ProcessGroup | None = None) -> list[int]:
        """Return the sums of all ranks' numbers.

        Args:
            numbers: As many on every rank.
            group: The group to communicate in; the default group when ``None``.

        Collective: every rank.
        """
        summed = torch.tensor(numbers, dtype=torch.int64)
        self._add_up(summed, group)
        return [int(number) for number in summed.tolist()]

    def union(self, lines: Iterable[str], group: ProcessGroup | None = None) -> list[str]:
        """Return the lines that any rank has, sorted.

        In round ``k`` each rank tells the rank ``2**k`` after it all that it knows, so that all know all in as many
        rounds as the number of ranks has digits, and each receives a line once in a round.

        Args:
            lines: This rank's; at least one rank has some.
            group: A group with a CPU backend; one of checkpoints' own when ``None``.

        Collective: every rank.
        """
        known, step = set(lines), 1
        while step < self.world_size:
            to, source = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
            heard = self._swap("\n".join(known).encode(), to, source, group)
            known.update(heard.decode().split("\n") if heard else ())
            step *= 2
        return sorted(known)

    def _swap(self, content: bytes, to: int, source: int, group: ProcessGroup | None) -> bytes:
        return swap_bytes(content, to, source, group or self.cpu_group())

    def _add_up(self, values: torch.Tensor, group: ProcessGroup | None) -> None:
        """Replace values on the CPU by their sums over all ranks."""
        if self.world_size == 1 or not values.numel():
            return
        import torch.distributed as dist

        if "cpu:" in dist.get_backend_config(group):
            dist.all_reduce(values, group=group)
        else:
            there = values.to(torch.accelerator.current_accelerator() or "cpu")
            dist.all_reduce(there, group=group)
            values.copy_(there)

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

    def keep_store_alive(self, key: str) -> None:
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
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_DISK_TIMEOUT_SECONDS))
            self._group = (world, group)
        return self._group[1]


def swap_bytes(content: bytes | None, to: int, source: int | None, group: ProcessGroup | None) -> bytes:
    """Send bytes to a rank while another one sends some to this one; return these.

    Args:
        content: What is sent; ``None`` where nothing is.
        to: The rank that it is sent to.
        source: The rank to receive from; ``None`` where nothing is received.
        group: A group with a CPU backend.

    Collective: the ranks that send to each other.
    """
    import torch.distributed as dist

    sending: list[Any] = []
    if content is not None:
        message = torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)[: len(content)]
        sending = [dist.isend(each, dst=to, group=group) for each in (torch.tensor([len(content)]), message)]
    received = torch.empty(0, dtype=torch.uint8)
    if source is not None:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=source, group=group)
        received = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(received, src=source, group=group)
    for each in sending:
        each.wait()
    return received.numpy().tobytes()


@contextmanager
def timed(call: str, path: object, nbytes: int) -> Iterator[None]:
    """Log how long the body took, where that was more than a second.

    Args:
        call: What the user called.
        path: The checkpoint.
        nbytes: How much all ranks together have written or read there.
    """
    start = time.monotonic()
    yield
    seconds = time.monotonic() - start
    if seconds > _PATIENCE_SECONDS:
        log.info("%s: %.1f MiB in %.1f s at '%s'.", call, nbytes / (1 << 20), seconds, path)
