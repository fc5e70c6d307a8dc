"""The user's time limit is that of collectives and meetings; NCCL's watchdog, which names nobody, comes later."""

import json
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from booster_core.ranks import nccl_margin_seconds, world
from booster_runtime.watch import flight_recorder
from booster_runtime.watch.failure_detector import FailureDetector, Record
from booster_runtime.watch.flight_recorder import FlightRecorder

LIMIT, SIZE = 40.0, 8


class Backend:
    """One rank's NCCL, as far as a group's time limit goes."""

    limit = None

    def _set_default_timeout(self, limit):
        self.limit = limit


class Group:
    """A process group whose device is not there."""

    def __init__(self):
        self.backend = Backend()

    def _get_backend(self, device):
        assert device == torch.device("cuda")
        return self.backend


@pytest.fixture
def opened(monkeypatch):
    """Open a world of NCCL that a monitor watches; return what torch was asked for, and what NCCL was set to."""
    asked, group = {}, Group()
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.update(options, backend=backend))
    monkeypatch.setattr(dist, "get_backend_config", lambda _=None: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(world, "_world", world.World())

    def open_world(*, is_watched):
        def watch(opening):
            opening.monitor = object() if is_watched else None

        monkeypatch.setattr(world, "_default_group", lambda: group if asked else None)
        place = {"rank": 0, "world_size": SIZE, "local_rank": 0}
        found = world.open_world(HashStore(), backend="nccl", timeout_seconds=LIMIT, watch=watch, **place)
        return asked, group.backend.limit, found

    return open_world


def test_collectives_and_meetings_have_the_limit_that_was_asked_for_and_nccl_a_little_more(opened):
    asked, of_nccl, found = opened(is_watched=True)
    assert asked["timeout"] == timedelta(seconds=LIMIT)
    assert found.timeout_seconds == LIMIT
    assert of_nccl == timedelta(seconds=LIMIT + nccl_margin_seconds(SIZE))
    assert timedelta(0) < of_nccl - asked["timeout"] < timedelta(seconds=21)


def test_without_a_monitor_nccl_has_the_limit_that_was_asked_for(opened):
    asked, of_nccl, _ = opened(is_watched=False)
    assert asked["timeout"] == timedelta(seconds=LIMIT)
    assert of_nccl is None


def entry(waited, limit):
    """Return what torch has recorded of an all-reduce that began some seconds ago."""
    return {
        "record_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 7,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": time.time_ns() - int(waited * 1e9),
        "retired": False,
        "thread_id": 0,
        "timeout_ms": limit * 1000,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
    }


@pytest.mark.parametrize("waited", [LIMIT - 1, LIMIT + 1])
def test_who_does_not_come_is_named_at_the_limit_that_was_asked_for(monkeypatch, waited):
    limit = LIMIT + nccl_margin_seconds(SIZE)
    dump = json.dumps({"entries": [entry(waited, limit)], "pg_status": {}})
    monkeypatch.setattr(flight_recorder, "_dumps", lambda: {"_dump_nccl_trace_json": lambda *_: dump})
    monkeypatch.setattr(flight_recorder, "_groups", lambda: [(None, "0")])
    for name, value in (
        ("is_initialized", True),
        ("get_world_size", SIZE),
        ("get_process_group_ranks", [*range(SIZE)]),
    ):
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    recorder = FlightRecorder()
    recorder._begin_ns = 0
    (point, expiry), *_ = recorder.read().waits.items()
    now = time.monotonic()
    detector = FailureDetector(["host"] * SIZE)
    for rank in range(SIZE):
        detector.joined(rank, 100 + rank)
        here = Record(waits=(point,), counts={"nccl:0": 7}, seconds=waited, overdue=point if expiry <= now else None)
        detector.here(rank, here if rank != 5 else Record(counts={"nccl:0": 6}, knows_groups=True), now)
    detector.tick(now)
    if waited < LIMIT:
        assert detector.failure is None
    else:
        assert "`all_reduce`" in detector.failure
        assert "has come to its time limit: rank 5 has not reached it" in detector.failure
