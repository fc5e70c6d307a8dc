from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from booster_core.cli import main
from booster_core.errors import ConfigError
from booster_hybrid.pictures.drawing import COLORS, draw
from booster_hybrid.pictures.reading import read_pipelines
from booster_hybrid.pictures.tracing import trace_of

_SVG = "{http://www.w3.org/2000/svg}"


def write_record(folder, rank, index=None, pipeline=0, batches=2, began=100.0):
    """Write what a rank of a pipeline of two stages does, a second for each action, the second rank a second later."""
    index = rank if index is None else index
    actions = [
        ["forward", index, 0, 0.0 + index, 1.0 + index],
        ["backward_input", index, 0, 4.0 - index, 5.0 - index],
        ["backward_weight", index, 0, 5.0 - index, 6.0 - index],
    ]
    lines = [{"kind": "start", "rank": rank, "index": index, "pipeline": pipeline, "device": "cpu"}]
    lines += [
        {
            "kind": "batch",
            "number": number,
            "began": began + 10 * number,
            "seconds": 6.0,
            "num_ranks": 2,
            "num_stages": 2,
            "num_microbatches": 1,
            "actions": actions,
        }
        for number in range(batches)
    ]
    path = folder / f"pipeline-rank{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path):
    write_record(tmp_path, 0)
    write_record(tmp_path, 1)
    return tmp_path


def test_a_record_tells_idle_shares(run):
    (pipeline,) = read_pipelines(run)
    batch = pipeline.batch(None)
    assert (batch.number, batch.seconds, batch.num_stages) == (1, 6.0, 2)
    assert [rank.idle_share(batch.seconds) for rank in batch.ranks] == [0.5, 0.5]


def test_ranks_whose_batch_began_later_are_drawn_later(tmp_path):
    write_record(tmp_path, 0)
    write_record(tmp_path, 1, began=100.5)
    (pipeline,) = read_pipelines(tmp_path)
    first, second = pipeline.batch(0).ranks
    assert (first.slices[0].start, second.slices[0].start) == (0.0, 1.5)
    assert pipeline.batch(0).seconds == 6.5


def test_each_pipeline_is_read_by_itself_and_in_its_own_order(tmp_path):
    write_record(tmp_path, 0, index=0, pipeline=0)
    write_record(tmp_path, 2, index=1, pipeline=0)
    write_record(tmp_path, 1, index=0, pipeline=1)
    write_record(tmp_path, 3, index=1, pipeline=1)
    pipelines = read_pipelines(tmp_path)
    assert [each.first_rank for each in pipelines] == [0, 1]
    assert [[rank.rank for rank in each.batch(0).ranks] for each in pipelines] == [[0, 2], [1, 3]]


def test_the_picture_has_a_box_for_each_action_where_and_as_long_as_it_was(run):
    (pipeline,) = read_pipelines(run)
    root = ET.fromstring(draw(pipeline.batch(0)))
    boxes = [each for each in root.iter(f"{_SVG}rect") if each.find(f"{_SVG}title") is not None]
    titles = [each.findtext(f"{_SVG}title") for each in boxes]
    assert titles[:3] == [
        "forward, stage 0, microbatch 0: 1 s",
        "gradients of inputs, stage 0, microbatch 0: 1 s",
        "gradients of weights, stage 0, microbatch 0: 1 s",
    ]
    assert len(boxes) == 6
    left = [float(each.get("x")) for each in boxes[:3]]
    second = (left[2] - left[0]) / 5  # pixels of a second
    assert left[1] - left[0] == pytest.approx(4 * second, abs=0.02)
    assert all(float(each.get("width")) == pytest.approx(second - 1, abs=0.02) for each in boxes)
    assert [each.get("fill") for each in boxes[:3]] == [
        COLORS["forward"],
        COLORS["backward_input"],
        COLORS["backward_weight"],
    ]
    words = [each.text for each in root.iter(f"{_SVG}text")]
    assert words.count("50.0%") == 2
    assert "rank 1" in words
    assert "backward" not in words  # the legend names what is there


def test_the_trace_has_a_track_for_each_stage(run, tmp_path):
    (pipeline,) = read_pipelines(run)
    trace_of(pipeline).write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    slices = [each for each in events if each["ph"] == "X" and each["name"].startswith("forward")]
    assert [(each["pid"], each["ts"], each["dur"]) for each in slices] == [
        (0, 0.0, 1e6),
        (1, 1e6, 1e6),
        (0, 10e6, 1e6),
        (1, 11e6, 1e6),
    ]
    assert {each["args"]["name"] for each in events if each["name"] == "thread_name"} == {
        "batches",
        "stage 0",
        "stage 1",
    }


def test_the_command_draws_the_last_batch_and_prints_idle_shares(run):
    result = CliRunner().invoke(main, ["pipeline", str(run)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        str(run / "pipeline0.svg"),
        str(run / "pipeline0.trace.json"),
        "rank 0: idle 50.0% of 6 s",
        "rank 1: idle 50.0% of 6 s",
    ]
    assert "Batch 1:" in (run / "pipeline0.svg").read_text(encoding="utf-8")


def test_the_command_draws_a_chosen_batch_into_a_chosen_file(run, tmp_path):
    out = tmp_path / "pictures"
    result = CliRunner().invoke(main, ["pipeline", str(run), "--batch", "0", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Batch 0:" in (out / "pipeline0.svg").read_text(encoding="utf-8")


def test_a_truncated_batch_record_is_skipped(run):
    path = run / "pipeline-rank1.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    (pipeline,) = read_pipelines(run)
    assert [batch.number for batch in pipeline.batches] == [0]


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no records of a pipeline.*pipeline_record=FOLDER"):
        read_pipelines(tmp_path)


def test_a_batch_that_is_not_there_is_refused(run):
    result = CliRunner().invoke(main, ["pipeline", str(run), "--batch", "7"])
    assert result.exit_code == 1
    assert "has no batch 7 in its record; those that ended on all ranks: 0 to 1." in result.output


def test_a_run_without_a_whole_batch_is_refused(tmp_path):
    write_record(tmp_path, 0)
    write_record(tmp_path, 1, batches=0)
    with pytest.raises(ConfigError, match="No batch ended on all ranks of the pipeline of rank 0"):
        read_pipelines(tmp_path)[0].batch(None)


@pytest.mark.parametrize("text", ["nonsense\n", "{}\n", "", '{"pipeline": 0, "index": 0, "rank": 0}\n[]\n'])
def test_files_that_are_no_records_are_refused(tmp_path, text):
    (tmp_path / "pipeline-rank0.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"pipeline-rank0\.jsonl' is not a record of a pipeline"):
        read_pipelines(tmp_path)
