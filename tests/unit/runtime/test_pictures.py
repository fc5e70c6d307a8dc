"""Drawings, marks of axes, PNG and traces."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from booster_core.errors import ConfigError
from booster_runtime.pictures.axes import byte_ticks, format_bytes, format_seconds, ticks
from booster_runtime.pictures.png import write_png
from booster_runtime.pictures.svg import Drawing
from booster_runtime.pictures.trace import Trace, read_traces

SVG = "{http://www.w3.org/2000/svg}"


def drawing():
    sheet = Drawing(200, 100)
    sheet.rectangle(1, 2, 30, 40.125, "#ff0000", title="a < b & c", opacity=0.5)
    sheet.line(0, 0, 5, 5, "#000000", dashes="6 4")
    sheet.text(1, 2, "words <&>", anchor="end")
    return sheet.render()


def test_a_drawing_is_well_formed_and_holds_what_was_drawn():
    root = ET.fromstring(drawing())
    rectangle = root.findall(f"{SVG}rect")[1]
    assert rectangle.get("height") == "40.12"
    assert rectangle.find(f"{SVG}title").text == "a < b & c"
    assert root.find(f"{SVG}line").get("stroke-dasharray") == "6 4"
    assert root.find(f"{SVG}text").text == "words <&>"


@pytest.mark.parametrize(("highest", "expected"), [
    (0.0, [0.0]), (10.0, [0, 2, 4, 6, 8, 10]), (0.7, [0, 0.2, 0.4, 0.6]), (61, [0, 20, 40, 60]),
])  # fmt: skip
def test_marks_are_round_and_few(highest, expected):
    assert ticks(highest) == pytest.approx(expected)


def test_marks_of_bytes_are_round_in_their_unit():
    assert [format_bytes(tick) for tick in byte_ticks(1.2 * 2**30, 3)] == ["0 B", "512 MiB", "1 GiB"]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (2.5, "2.5 s"), (0.02, "20 ms"), (3e-6, "3 µs")])
def test_times_are_written_as_people_do(seconds, text):
    assert format_seconds(seconds) == text


def test_png_is_written_where_the_renderer_is_there(tmp_path):
    pytest.importorskip("resvg_py", reason="the extra `pictures` of booster-core is not installed")
    write_png(drawing(), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 400


def test_png_without_the_renderer_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ConfigError, match=r"pip install 'booster-runtime\[pictures\]'"):
        write_png(drawing(), tmp_path / "a.png")


def test_a_trace_has_tracks_slices_spans_and_counters(tmp_path):
    trace = Trace(tmp_path / "run" / "a-rank3.trace.json", rank=3)
    trace.slice("model", "forward", 0.5, 1.0, layer=3)
    trace.span("disk", "read", 0.6, 0.7)
    trace.span("disk", "write", 0.65, 0.9, bytes=5)
    trace.counter("bytes", 0.5, {"host": 10, "disk": 20})
    trace.flush()
    events = json.loads((tmp_path / "run" / "a-rank3.trace.json").read_text() + "]")
    assert events == read_traces(tmp_path / "run")
    assert {event["pid"] for event in events} == {3}
    assert events[0]["args"] == {"name": "rank 3"}
    (forward,) = [event for event in events if event["ph"] == "X"]
    assert (forward["ts"], forward["dur"], forward["args"]) == (500_000.0, 500_000.0, {"layer": 3})
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "model", 2: "disk"}
    spans = [event for event in events if event["ph"] in "be"]
    assert [event["id"] for event in spans] == ["3.1", "3.1", "3.2", "3.2"]
    assert {event["cat"] for event in spans} == {"disk"}
    (counted,) = [event for event in events if event["ph"] == "C"]
    assert counted["args"] == {"host": 10, "disk": 20}


def test_a_trace_that_a_kill_cut_off_is_read_up_to_its_last_whole_event(tmp_path):
    path = tmp_path / "a-rank0.trace.json"
    trace = Trace(path, rank=0)
    for number in range(300):  # more than are written at once
        trace.counter("bytes", number, {"host": number})
    written = read_traces(tmp_path)
    assert 100 < len(written) < 301
    path.write_text(path.read_text()[:-10])
    assert read_traces(tmp_path) == written[:-1]
    path.write_text(path.read_text().replace('"ph": "C"', '"ph": "C', 1))
    with pytest.raises(ConfigError, match=r"Line 3 of '.*' is no event of a trace"):
        read_traces(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no \*-rank\*\.trace\.json. Name a folder of `watch_memory`"):
        read_traces(tmp_path / "other")


def test_pictures_do_not_import_torch():
    code = "import sys, booster_runtime.pictures.svg, booster_runtime.pictures.trace, booster_runtime.pictures.png"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
