"""Profiles name the parts of a step, traces of ranks are put together, and snapshots say who holds memory."""

import json
import types
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from ranked import on_ranks
from reference_plugins import ReferencePlugin

from booster_core import Booster
from booster_core.cli import main
from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper
from booster_core.ranks import NamedCall
from booster_core.ranks.calls import OBSERVERS
from booster_runtime import collectives
from booster_runtime.trace import Trace
from booster_tools import profile
from booster_tools.tracking import memory_snapshots


@on_ranks(2)
def test_parts_of_a_step_are_ranges(tmp_path):
    def classes():
        return NamedCall.__enter__, NamedCall.__exit__, ModelWrapper.__call__, collectives.transport_of

    before = classes()
    booster, model = Booster(plugin=ReferencePlugin()), torch.nn.Linear(8, 8)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    flag = torch.ones(1)
    with profile(booster, tmp_path, wait=0, warmup=1, active=2):
        assert before == classes(), "calls are observed, nothing is patched"
        for step in range(3):
            booster.backward(model(torch.ones(2, 8)).mean(), optimizer)
            if step == 1:
                booster.save_model(model, tmp_path / "model.safetensors")
            collectives.all_reduce(flag).wait()
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert flag.item() == 2**3, "what is named is what is called"
    assert not OBSERVERS
    assert "save_model" not in vars(booster)
    path = tmp_path / f"trace-rank{booster.context.coordinator.rank}.json"
    events = json.loads(path.read_text())["traceEvents"]
    parts = ("forward", "backward", "clip_grad_by_norm", "step", "reduce", "save")
    assert {f"booster:{part}" for part in parts} <= {event["name"] for event in events}
    forwards = [e for e in events if e["name"] == "booster:forward" and e.get("cat") == "user_annotation"]
    assert len(forwards) == 2  # of the active steps


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"active": 0}, "`active=0` of `booster_tools.profile`"),
        ({"wait": -1}, "`wait=-1`"),
        ({"warmup": True}, "`warmup=True`"),
    ],
)
def test_numbers_of_steps_are_checked(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message), profile(Booster(), tmp_path, **settings):
        pass


@pytest.mark.parametrize("steps", [1, 2])
def test_a_block_without_a_step_to_keep_says_that_there_is_no_trace(steps, tmp_path):
    booster, model = Booster(), torch.nn.Linear(2, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def profiled():
        with profile(booster, tmp_path):
            for _ in range(steps):
                optimizer.step()

    with pytest.raises(ConfigError, match=rf"wrote no trace: the block took {steps} optimizer step"):
        profiled()


# ---- ``booster trace``: one file of the ranks' traces, and the idle shares of a known schedule


def write(folder, rank, pipeline=0, batches=2, late=0.0):
    """Write what a rank of two stages does, a second for each action: of 6 s, each rank computes 3."""
    trace = Trace(folder / f"pipeline-rank{rank}.trace.json", rank=rank)
    for batch in range(batches):
        begin, stage = 100.0 + 10 * batch + late, rank % 2
        about = {"batch": batch, "pipeline": pipeline}
        trace.slice("batches", f"batch {batch}", begin, begin + 6.0 - late, **about)
        for work, at in (("forward", stage), ("backward_input", 4 - stage), ("backward_weight", 5 - stage)):
            done = {"batch": batch, "stage": stage, "microbatch": 0}
            trace.slice(f"stage {stage}", f"{work} 0", begin + at, begin + at + 1, **done)
    trace.flush()


def trace(*arguments):
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)])
    return result.exit_code, result.output.splitlines()


def test_ranks_are_put_together_and_idle_shares_are_those_of_the_schedule(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, pipeline=2 * (rank // 2))
    code, lines = trace(tmp_path)
    assert code == 0
    assert lines == [str(tmp_path / "trace.json"), *(f"rank {rank}: idle 50.0% of 6 s" for rank in range(4))]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 2 * 4
    assert trace(tmp_path, "--out", tmp_path / "out" / "all.json")[1][0] == str(tmp_path / "out" / "all.json")


def test_the_last_batch_is_the_one_that_all_ranks_ended_from_its_first_begin(tmp_path):
    write(tmp_path, 0)
    write(tmp_path, 1, batches=1, late=0.5)
    assert trace(tmp_path)[1][1:] == ["rank 0: idle 50.0% of 6 s", "rank 1: idle 50.0% of 6 s"]


def test_a_folder_without_traces_is_refused(tmp_path):
    code, lines = trace(tmp_path)
    assert code == 1
    assert "holds no *-rank*.trace.json" in lines[0]


# ---- snapshots of a GPU's allocator: on request, when it is full, and one line where there is none


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
