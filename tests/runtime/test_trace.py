"""Traces: what they hold, and what a kill leaves of them."""

import json
import subprocess
import sys

import pytest

from booster_core.errors import ConfigError
from booster_runtime.trace import Trace, read_traces


def test_a_trace_has_tracks_and_slices(tmp_path):
    trace = Trace(tmp_path / "run" / "a-rank3.trace.json", rank=3)
    trace.slice("model", "forward", 0.5, 1.0, layer=3)
    trace.slice("disk", "read", 0.6, 0.7)
    trace.flush()
    events = json.loads((tmp_path / "run" / "a-rank3.trace.json").read_text() + "]")
    assert events == read_traces(tmp_path / "run")
    assert {event["pid"] for event in events} == {3}
    assert events[0]["args"] == {"name": "rank 3"}
    forward, _ = [event for event in events if event["ph"] == "X"]
    assert (forward["ts"], forward["dur"], forward["args"]) == (500_000.0, 500_000.0, {"layer": 3})
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "model", 2: "disk"}


def test_a_trace_that_a_kill_cut_off_is_read_up_to_its_last_whole_event(tmp_path):
    path = tmp_path / "a-rank0.trace.json"
    trace = Trace(path, rank=0)
    for number in range(300):  # more than are written at once
        trace.slice("model", "forward", number, number + 1)
    written = read_traces(tmp_path)
    assert 100 < len(written) < 302
    path.write_text(path.read_text()[:-10])
    assert read_traces(tmp_path) == written[:-1]
    path.write_text(path.read_text().replace('"ph": "X"', '"ph": "C', 1))
    with pytest.raises(ConfigError, match=r"Line 4 of '.*' is no event of a trace"):
        read_traces(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no \*-rank\*\.trace\.json. Name that of `Hybrid"):
        read_traces(tmp_path / "other")


def test_traces_do_not_import_torch():
    code = "import sys, booster_runtime.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
