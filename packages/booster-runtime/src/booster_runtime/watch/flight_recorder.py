"""Torch's flight recorder: its settings, and the collectives in which this process waits for other ranks.

Torch keeps a record of the last collectives of each backend: group, number, operation, dtypes and sizes. A summary, the
numbers of the last collectives that were begun and completed, takes 10 to 25 us. All entries take 50 ms, in which other
threads stand still, so they are read only when the summary has stood still for seconds. Sends, receives,
``monitored_barrier`` and ``new_group`` are not recorded; see `booster_runtime.collectives.pending`.
"""

from __future__ import annotations

import importlib
import json
import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, MutableMapping

_SETTINGS = (
    # Torch 2.10 records nothing otherwise. Ten times as many entries hold up other threads for more than a second.
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    # The mode in which the watchdog leaves the record alone until it is written: pytorch/pytorch#121055.
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
)
"""The names of each setting, the present one first, and its value; all but the first are NCCL's own."""
_ENDING_PROCESSES = ("nccl",)
"""Backends whose watchdog ends the process when a collective reaches its time limit; others raise."""


def keep_flight_record(environment: MutableMapping[str, str], backend: str) -> None:
    """Let process groups record their collectives, where the user has not set it otherwise.

    Args:
        environment: The process's environment variables, before the first process group is made.
        backend: The backend of the process groups.
    """
    for names, value in _SETTINGS if "nccl" in backend else _SETTINGS[:1]:
        if not any(name in environment for name in names):
            environment[names[0]] = value


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A collective of this process, as torch has recorded it.

    Args:
        group: Backend and name of its process group.
        number: Which collective of that group it is.
        operation: Its name.
        tensors: Number of elements and dtype of each tensor that it reads and writes.
        ranks: The world ranks of the group.
        is_waiting: Whether it was begun, but not completed.
        expires_at: When it ends the process, by `time.monotonic`; ``None`` where it will raise an error instead.
    """

    group: str
    number: int
    operation: str
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    is_waiting: bool
    expires_at: float | None


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is recorded of this process.

    Args:
        collectives: Those in which it waits, and those that were asked for.
        begun: The number of the last collective of each group.
        is_whole: Whether nothing was overwritten, so that groups that ``begun`` does not have had no collective.
    """

    collectives: tuple[Recorded, ...] = ()
    begun: Mapping[str, int] = field(default_factory=dict)
    is_whole: bool = False


class FlightRecorder:
    """The record of this process, from now on.

    Args:
        timeout_seconds: Time limit of collectives of backends that don't record it.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._dumps = _dumps()
        self._begin_ns = time.time_ns()
        self._earlier = frozenset(self._status())  # groups that this process had before

    def numbers_in_flight(self) -> tuple[tuple[str, str, str, str], ...]:
        """Return kind and name of each group with its last collective that was begun and completed; none if all are.

        While collectives are in flight and no number changes, this process may wait for other ranks.
        """
        try:
            status = [(*group, *numbers) for group, numbers in self._status().items() if group not in self._earlier]
        except Exception:  # noqa: BLE001 - another version's record: what is in flight is not known, the rest is
            self._dumps.clear()
            return ()
        return tuple(status) if any(begun != completed for _, _, begun, completed in status) else ()

    def read(self, places: Collection[tuple[str, int]] = ()) -> Recording:
        """Return the collectives in which this process waits, and those at some places: groups and numbers.

        Those of threads that Python has started are left out: they don't hold up the main thread.
        """
        try:
            return self._read(places)
        except Exception:  # noqa: BLE001 - as above
            self._dumps.clear()
            return Recording()

    def _read(self, places: Collection[tuple[str, int]]) -> Recording:
        ranks_of = {name: tuple(dist.get_process_group_ranks(group)) for group, name in _groups()}
        others = {thread.ident for thread in threading.enumerate() if _is_background(thread)}
        found: list[Recorded] = []
        begun: dict[str, int] = {}
        is_whole = True
        for dump in self._dumps.values():
            # What is active can't be asked for alone: under gloo, everything counts as active.
            entries = json.loads(dump(True, False)).get("entries", [])  # noqa: FBT003 - it takes no keywords
            is_whole &= not entries or entries[0]["record_id"] == 0 or entries[0]["time_created_ns"] < self._begin_ns
            for entry in entries:
                name, number = entry["process_group"][0], int(entry["collective_seq_id"])
                if entry["is_p2p"] or entry["time_created_ns"] < self._begin_ns or name not in ranks_of:
                    continue
                group = f"{entry['profiling_name'].partition(':')[0]}:{name}"
                begun[group] = number
                is_waiting = not entry["retired"] and int(entry["thread_id"]) not in others
                if is_waiting or (group, number) in places:
                    found.append(self._recorded(entry, group, ranks_of[name], is_waiting=is_waiting))
        return Recording(collectives=tuple(found), begun=begun, is_whole=is_whole)

    def _recorded(self, entry: dict[str, Any], group: str, ranks: tuple[int, ...], *, is_waiting: bool) -> Recorded:
        backend, _, operation = entry["profiling_name"].partition(":")
        expires_at = None
        if backend in _ENDING_PROCESSES:
            limit = entry["timeout_ms"] / 1000 if backend == "nccl" else self._timeout_seconds
            expires_at = time.monotonic() + limit - (time.time_ns() - entry["time_created_ns"]) / 1e9
        return Recorded(
            group=group,
            number=int(entry["collective_seq_id"]),
            operation=operation,
            tensors=tuple(
                f"{math.prod(shape)} {dtype}"
                for way in ("input", "output")
                for shape, dtype in zip(entry[f"{way}_sizes"], entry[f"{way}_dtypes"], strict=True)
            ),
            ranks=ranks,
            is_waiting=is_waiting,
            expires_at=expires_at,
        )

    def _status(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Return the numbers of the last collectives that each group has begun and completed."""
        return {
            (source, group): (numbers["last_enqueued_collective"], numbers["last_completed_collective"])
            for source, dump in self._dumps.items()
            for group, numbers in json.loads(dump(False, True)).get("pg_status", {}).items()  # noqa: FBT003 - as above
        }


def _dumps() -> dict[str, Callable[[bool, bool], bytes]]:
    """Return what dumps the record of each kind of backend that this torch has; gloo's and NCCL's are apart."""
    private = importlib.import_module("torch._C._distributed_c10d")
    found = {name: getattr(private, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")}
    return {name: dump for name, dump in found.items() if dump is not None}


def _groups() -> list[tuple[Any, str]]:
    """Return this process's groups with their names, as the record has them."""
    return list(dist.distributed_c10d._world.pg_names.items())  # noqa: SLF001 - there is no public way


def _is_background(thread: threading.Thread) -> bool:
    """Return whether Python started a thread that is not the main one; autograd's threads are not Python's."""
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)  # noqa: SLF001
