"""What a run writes of its memory, when it is asked to and when it is not."""

import tracemalloc

import torch

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_gemini.memory import record_file
from booster_runtime.trace import read_traces
from booster_testing import run_on_ranks


def train(steps=3, **options):
    """Train, and return the name of the class of its memory."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    plugin = GeminiPlugin(min_chunk_bytes=1 << 14, **options)
    model, optimizer, *_ = Booster("cpu", plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        optimizer.backward(model(torch.ones(4, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
    memory = model.gatherer.memory
    if memory.moves:
        memory.close()
    return type(memory).__name__


def test_each_rank_records_its_moves_within_its_budget(tmp_path):
    budget = 16 * 6 * 64 * 65 // 3
    auto = {"placement_policy": "auto", "memory_budget_bytes": budget, "offload_dir": tmp_path}
    run_on_ranks(train, 2, memory_record=tmp_path / "run", **auto)
    events = read_traces(tmp_path / "run")
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        slices = [event for event in own if event["ph"] == "X"]
        steps = [event for event in slices if event["name"].startswith("step ")]
        assert [event["name"] for event in steps] == ["step 0", "step 1", "step 2"]
        assert all(event["args"]["budget_bytes"] == budget for event in steps)
        here = [sum(event["args"].values()) for event in own if event["name"] == "bytes in cpu"]
        assert 0 < max(here) <= budget
        (phases,) = (event["tid"] for event in own if event.get("args") == {"name": "phases"})
        inside = [each for each in slices if each["ts"] >= steps[-1]["ts"]]
        assert [each["name"] for each in inside if each["tid"] == phases] == ["forward", "backward", "step"]
        assert {each["name"] for each in inside} >= {"step 2", "0", "5"}, "modules"
        ends = [each["ts"] + each["dur"] for each in steps]
        assert all(end <= each["ts"] + 1 for end, each in zip(ends, steps[1:], strict=False))


def test_what_goes_to_the_disk_and_comes_back_is_recorded(tmp_path):
    run_on_ranks(train, 1, memory_record=tmp_path / "run", offload_dir=tmp_path, offload_optim_frac=1.0)
    events = read_traces(tmp_path / "run")
    moves = [event for event in events if event["ph"] == "b"]
    assert {event["cat"] for event in moves} >= {"moves out"}
    assert {event["name"].split()[0] for event in moves} == {"grad", "optim"}
    assert all(event["name"].endswith(f" {event['args']['chunk']}") for event in moves)
    assert {event["args"]["bytes"] for event in moves} == {4 * 64 * 65, 2 * 4 * 64 * 65}
    assert max(event["args"].get("optim", 0) for event in events if event["name"] == "bytes in disk") > 0


def test_a_run_that_moves_nothing_is_recorded_too(tmp_path):
    run_on_ranks(train, 1, memory_record=tmp_path / "run")
    events = read_traces(tmp_path / "run")
    assert {event["name"] for event in events if event["name"].startswith("bytes in")} == {"bytes in cpu"}
    assert not [event for event in events if event["ph"] == "b"]


def traces_of_recording(folder):
    tracemalloc.start()
    try:
        train(offload_dir=folder, offload_optim_frac=1.0)
        taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    only = tracemalloc.Filter(inclusive=True, filename_pattern=record_file.__file__)
    return len(taken.filter_traces([only]).traces)


def test_recording_makes_no_object_when_off(tmp_path):
    assert run_on_ranks(train, 1) == ["Memory"]
    assert run_on_ranks(traces_of_recording, 1, tmp_path) == [0]
