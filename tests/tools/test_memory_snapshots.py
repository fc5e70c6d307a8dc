"""Snapshots of a GPU's allocator: on request, when it is full, and one line where there is none."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from booster_tools.tracking import memory_snapshots


@pytest.fixture
def recorder(monkeypatch):
    """Put a recorder in the place of CUDA's; it notes the calls that it gets."""
    calls = []

    def dump(path):
        calls.append(("dump", Path(path).name))
        Path(path).write_bytes(b"snapshot")

    def record(enabled="all", *, max_entries=None):
        calls.append((enabled, max_entries))

    memory = types.SimpleNamespace(_dump_snapshot=dump, _record_memory_history=record, calls=calls)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(memory=memory))
    return memory


def test_a_snapshot_is_written_on_request(recorder, tmp_path):
    with memory_snapshots(tmp_path / "run", max_entries=10) as snapshots:
        assert snapshots.write() == tmp_path / "run" / "memory-snapshot-rank0-0.pickle"
        snapshots.write("late")
    names = ["memory-snapshot-rank0-0.pickle", "memory-snapshot-rank0-late.pickle"]
    assert (
        [path.name for path in snapshots.paths] == sorted(each.name for each in (tmp_path / "run").iterdir()) == names
    )
    assert recorder.calls == [("all", 10), *(("dump", name) for name in names), (None, None)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_a_full_memory_leaves_a_snapshot_and_other_errors_none(recorder, tmp_path, error, caplog):
    def train():
        with memory_snapshots(tmp_path):
            raise error

    with pytest.raises(error):
        train()
    is_full = error is torch.OutOfMemoryError
    path = tmp_path / "memory-snapshot-rank0-oom.pickle"
    assert list(tmp_path.iterdir()) == [path] * is_full
    assert (f"Out of memory: {path} says who holds it" in caplog.text) == is_full
    assert recorder.calls[-1] == (None, None)


def test_without_a_gpu_one_line_says_that_nothing_is_recorded(tmp_path, caplog):
    with memory_snapshots(tmp_path / "run") as snapshots:
        assert snapshots.write() is None
    assert [record.getMessage() for record in caplog.records] == [
        "`memory_snapshots` records nothing: torch has no record of the allocations of the CPU."
    ]
    assert not (tmp_path / "run").exists()
