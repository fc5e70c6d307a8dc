"""Torch's flight recorder: its settings, and the collectives in which this process waits for other ranks.

Torch keeps a record of the last collectives of each backend: group, number, operation, dtypes and sizes. A summary, the
numbers of the last collectives that were begun and completed, takes 10 to 25 us. All entries take 50 ms, in which other
threads stand still, so they are read only when the summary has stood still for seconds, or the run ends. Sends,
receives, ``monitored_barrier`` and ``new_group`` are not recorded; see `booster_runtime.collectives.pending`.
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

from booster_core.log import log
from booster_core.ranks import nccl_margin_seconds
from booster_runtime.watch.failure_detector import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

_SETTINGS = (
    # Torch 2.10 records nothing otherwise. Ten times as many entries hold up other threads for more than a second.
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    # The mode in which the watchdog leaves the record alone until it is written: pytorch/pytorch#121055.
    (("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "3"),
)
"""The names of each setting, the present one first, and its value; all but the first are NCCL's own."""
_OF_EQUAL_SIZES = ("all_reduce", "reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base")
"""Collectives whose tensors have the same number of elements on every rank; torch's names of them."""


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
class FlightRecord:
    """What is recorded of this process.

    Args:
        waits: The collectives in which the main thread waits, or autograd's; by when each comes to its time limit, by
            `time.monotonic`, or ``None`` where it raises then.
        counts: The number of the last collective of each group.
        is_whole: Whether nothing was overwritten, so that groups that ``counts`` does not have had no collective.
    """

    waits: Mapping[Point, float | None] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    is_whole: bool = False


class FlightRecorder:
    """The record of this process, from now on."""

    def __init__(self) -> None:
        self._dumps = _dumps()
        self._begin_ns = time.time_ns()
        self._earlier = frozenset(self._status())  # groups that this process had before

    def numbers_in_flight(self) -> tuple[tuple[str, str, str, str], ...]:
        """Return kind and name of each group with its last collective that was begun and completed; none if all are.

        While collectives are in flight and no number changes, this process may wait for other ranks.
        """
        try:
            status = [(*group, *numbers) for group, numbers in self._status().items() if group not in self._earlier]
        except Exception as error:  # noqa: BLE001 - another version's record: what is in flight is not known, the rest is
            self._give_up(error)
            return ()
        return tuple(status) if any(begun != completed for _, _, begun, completed in status) else ()

    def read(self) -> FlightRecord:
        """Return the collectives in which this process waits.

        Those of threads that Python has started are left out: they don't hold up the main thread.
        """
        try:
            return self._read() if dist.is_initialized() else FlightRecord()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return FlightRecord()

    def _give_up(self, error: Exception) -> None:
        self._dumps.clear()
        log.warning(
            "This torch's record of collectives can't be read (%s: %s): the monitor does not see in which of torch's "
            "collectives ranks wait. It still sees Booster's calls, and ranks that raise or die.",
            type(error).__name__,
            error,
        )

    def _read(self) -> FlightRecord:
        everyone = dist.get_world_size()
        members = {name: tuple(dist.get_process_group_ranks(group)) for group, name in _groups()}
        ranks_of = {name: None if len(ranks) == everyone else ranks for name, ranks in members.items()}
        others = {thread.ident for thread in threading.enumerate() if _is_background(thread)}
        waits: dict[Point, float | None] = {}
        counts: dict[str, int] = {}
        is_whole = bool(self._dumps)  # none is left where one could not be read
        for dump in self._dumps.values():
            # What is active can't be asked for alone: under gloo, everything counts as active.
            entries = json.loads(dump(True, False)).get("entries", [])  # noqa: FBT003 - it takes no keywords
            is_whole &= not entries or entries[0]["record_id"] == 0 or entries[0]["time_created_ns"] < self._begin_ns
            for entry in entries:
                name, number = entry["process_group"][0], int(entry["collective_seq_id"])
                if entry["is_p2p"] or entry["time_created_ns"] < self._begin_ns or name not in ranks_of:
                    continue
                backend, _, operation = entry["profiling_name"].partition(":")
                group = f"{backend}:{name}"
                counts[group] = number
                if not entry["retired"] and int(entry["thread_id"]) not in others:
                    sizes = _sizes(entry) if operation in _OF_EQUAL_SIZES else ()
                    waits[Point(group, number, ranks_of[name], (operation, *sizes))] = _expiry(entry, backend)
        return FlightRecord(waits=waits, counts=counts, is_whole=is_whole)

    def _status(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Return the numbers of the last collectives that each group has begun and completed."""
        return {
            (source, group): (numbers["last_enqueued_collective"], numbers["last_completed_collective"])
            for source, dump in self._dumps.items()
            for group, numbers in json.loads(dump(False, True)).get("pg_status", {}).items()  # noqa: FBT003 - as above
        }


def _expiry(entry: Mapping[str, Any], backend: str) -> float | None:
    """Return when a collective comes to the time limit of its run, a little before NCCL's watchdog ends the process.

    Other backends raise at their time limit.
    """
    if backend != "nccl":
        return None
    limit = float(entry["timeout_ms"]) / 1000
    # A group with a limit of the user's own has not got the margin on top.
    limit -= min(nccl_margin_seconds(dist.get_world_size()), limit / 2)
    return time.monotonic() + limit - (time.time_ns() - int(entry["time_created_ns"])) / 1e9


def _sizes(entry: Mapping[str, Any]) -> list[str]:
    return [
        f"{math.prod(shape)} {dtype}"
        for way in ("input", "output")
        for shape, dtype in zip(entry[f"{way}_sizes"], entry[f"{way}_dtypes"], strict=True)
    ]


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
