"""What a run writes of its memory, when it is asked to and when it is not."""

import tracemalloc

import torch

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_gemini.memory import record_file
from booster_gemini.pictures.drawing import draw
from booster_gemini.pictures.levels import least_of_process, samples
from booster_gemini.pictures.reading import read_records
from booster_testing import run_on_ranks


def train(steps=3, **options):
    """Train, and return the name of the home's class."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    plugin = GeminiPlugin(min_chunk_bytes=1 << 14, **options)
    model, optimizer, *_ = Booster("cpu", plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        optimizer.backward(model(torch.ones(4, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
    home = model.manager.home
    if home.moves:
        home.close()
    return type(home).__name__


def test_each_rank_records_its_moves_within_its_budget(tmp_path):
    budget = 16 * 6 * 64 * 65 // 3
    auto = {"placement_policy": "auto", "memory_budget_bytes": budget, "offload_dir": tmp_path}
    run_on_ranks(train, 2, memory_record=tmp_path / "run", **auto)
    records = read_records(tmp_path / "run")
    assert [record.facts["rank"] for record in records] == [0, 1]
    for record in records:
        assert [step.number for step in record.steps] == [0, 1, 2]
        least = least_of_process(record)
        for step in record.steps:
            for sample in samples(step, "cpu", least):
                assert sum(value for kind, value in sample.here.items() if kind != "other") <= budget
        last = record.steps[-1]
        assert [phase for _, _, phase in last.phases()] == ["forward", "backward", "step"]
        assert "budget 130 KiB" in draw(record, last)


def test_what_goes_to_the_disk_and_comes_back_is_recorded(tmp_path):
    run_on_ranks(train, 1, memory_record=tmp_path / "run", offload_dir=tmp_path, offload_optim_frac=1.0)
    (record,) = read_records(tmp_path / "run")
    places = {stay.place for stay in record.steps[-1].stays if stay.role == "optim"}
    assert {"cpu", "leaving"} <= places


def test_a_run_that_moves_nothing_is_recorded_too(tmp_path):
    run_on_ranks(train, 1, memory_record=tmp_path / "run")
    (record,) = read_records(tmp_path / "run")
    assert {stay.place for stay in record.steps[-1].stays} == {"cpu"}


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
    assert run_on_ranks(train, 1) == ["Home"]
    assert run_on_ranks(traces_of_recording, 1, tmp_path) == [0]
