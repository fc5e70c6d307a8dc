"""Records of what was where, and the pictures and traces that `booster memory` makes of them."""

import json
import sys
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from booster_core.cli import main
from booster_core.errors import ConfigError
from booster_gemini.pictures.drawing import draw
from booster_gemini.pictures.levels import Sample, columns, least_of_process, samples
from booster_gemini.pictures.reading import Stay, read_records
from booster_gemini.pictures.tracing import trace_of

SVG = "{http://www.w3.org/2000/svg}"
ENTRIES = [
    {"seconds": 0.0, "kind": "start", "rank": 0, "device": "cpu", "budget_bytes": 300, "policy": "auto"},
    {"seconds": 0.0, "kind": "block", "chunk": 0, "role": "param", "place": "cpu", "bytes": 100},
    {"seconds": 0.0, "kind": "block", "chunk": 0, "role": "optim", "place": "disk", "bytes": 200},
    {"seconds": 0.0, "kind": "bytes", "used": 150, "held": 160, "process": 1000},
    {"seconds": 0.0, "kind": "moment", "name": "layers.0"},
    {"seconds": 1.0, "kind": "moment", "name": "layers.1"},
    {"seconds": 1.0, "kind": "bytes", "used": 150, "held": 160, "process": 1070},
    {"seconds": 1.5, "kind": "moment", "name": "backward"},
    {"seconds": 2.0, "kind": "block", "chunk": 0, "role": "optim", "place": "coming", "bytes": 200},
    {"seconds": 2.0, "kind": "bytes", "used": 300, "held": 300, "process": 1140},
    {"seconds": 2.5, "kind": "moment", "name": "step"},
    {"seconds": 3.0, "kind": "block", "chunk": 0, "role": "optim", "place": "cpu", "bytes": 200},
    {"seconds": 4.0, "kind": "step", "step": 0, "unplanned": 7},
    {"seconds": 4.4, "kind": "moment", "name": "layers.0"},
    {"seconds": 4.5, "kind": "block", "chunk": 0, "role": "optim", "place": "nowhere", "bytes": 0},
    {"seconds": 5.0, "kind": "step", "step": 1, "unplanned": 0},
]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [json.dumps(entry) for entry in ENTRIES]
    (folder / "memory-rank0.jsonl").write_text("\n".join(lines) + '\n{"seconds": 5.1, "ki')  # cut short by its end
    return folder


def booster(*arguments):
    return CliRunner().invoke(main, ["memory", *map(str, arguments)])


def test_a_record_tells_where_each_block_lay_from_when_to_when(run):
    (record,) = read_records(run)
    first, _ = record.steps
    assert Stay(0, "optim", "disk", 200, 0.0, 2.0) in first.stays
    assert Stay(0, "optim", "coming", 200, 2.0, 3.0) in first.stays
    assert Stay(0, "param", "cpu", 100, 0.0, 4.0) in first.stays
    assert first.phases() == [(0.0, 1.5, "forward"), (1.5, 2.5, "backward"), (2.5, 4.0, "step")]


def test_a_step_begins_when_the_model_does_something(run):
    (record,) = read_records(run)
    second = record.steps[1]
    assert (second.start, second.end) == (4.4, 5.0)
    assert Stay(0, "optim", "cpu", 200, 4.4, 4.5) in second.stays
    assert [level.process for level in second.levels] == [1140]


def test_bytes_are_those_of_blocks_gathered_chunks_and_what_is_above_the_least(run):
    (record,) = read_records(run)
    assert least_of_process(record) == 840
    found = {sample.seconds: sample for sample in samples(record.steps[0], "cpu", 840)}
    assert found[0.0].here == {"param": 100, "grad": 0, "optim": 0, "gathered": 50, "other": 0}
    assert found[0.0].elsewhere == {("disk", "optim"): 200}
    assert found[1.0].here["other"] == 70
    assert found[2.0].here == {"param": 100, "grad": 0, "optim": 200, "gathered": 0, "other": 0}
    assert found[2.0].elsewhere == {("disk", "optim"): 0}


def test_a_column_shows_the_highest_of_its_moments():
    found = [Sample(at, {"param": value}) for at, value in [(0.0, 5), (0.4, 9), (0.6, 3), (2.1, 4)]]
    assert [sample.total for sample in columns(found, 3.0, 3)] == [9, 3, 4]


def test_the_picture_has_every_stay_the_phases_and_the_budget(run):
    (record,) = read_records(run)
    root = ET.fromstring(draw(record, record.steps[0]))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "optimizer state of chunk 0, 200 B: coming for 1 s" in titles
    assert "parameters: at most 100 B" in titles
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"forward", "backward", "step", "budget 300 B"} <= set(words)
    assert any("7 events that were not foreseen" in each for each in words)


def test_the_trace_has_moves_modules_and_bytes(run):
    (record,) = read_records(run)
    trace = trace_of(record, record.steps)
    trace.write(run / "t.json")
    events = json.loads((run / "t.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        "step 0", "step 1", "forward", "backward", "step", "layers.0", "layers.1",
    }  # fmt: skip
    (begin,) = [event for event in events if event["ph"] == "b"]
    assert (begin["name"], begin["ts"], begin["args"]) == ("optim 0", 2e6, {"chunk": 0, "bytes": 200})
    assert {"bytes in cpu", "bytes on disk"} == {event["name"] for event in events if event["ph"] == "C"}


def test_the_verb_writes_picture_and_trace(run, tmp_path):
    result = booster(run, "--step", 0, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["memory-rank0.svg", "memory-rank0.trace.json"]
    assert "step 0" in (tmp_path / "out" / "memory-rank0.svg").read_text()


def test_a_step_that_is_not_there_is_refused(run):
    result = booster(run, "--step", 5)
    assert result.exit_code == 1
    assert "Rank 0 has no step 5 in its record; those that ended: 0 to 1." in result.output


def test_a_folder_without_a_record_is_refused(tmp_path):
    result = booster(tmp_path)
    assert result.exit_code == 1
    assert "holds no memory-rank*.jsonl. Name the folder that was given as" in result.output


def test_png_without_its_renderer_is_refused_with_the_remedy(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    result = booster(run, "--png")
    assert result.exit_code == 1
    assert "pip install 'booster-runtime[pictures]'" in result.output
    assert (run / "memory-rank0.svg").exists()


def test_a_damaged_record_is_told_by_its_line(run):
    path = run / "memory-rank0.jsonl"
    path.write_text(path.read_text().replace('"kind": "moment"', '"kind": "moment', 1))
    with pytest.raises(ConfigError, match=r"Line 5 of '.*' is no entry of a memory record"):
        read_records(run)
