"""Curves, memory over time and plans: what is drawn, seen in matplotlib's own objects or in the words of an SVG."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from unittest import mock

import numpy as np
import pytest

from booster_core.errors import ConfigError
from booster_tools import pictures
from booster_tools.pictures import check_picture, draw_curve, draw_memory, draw_plan, format_bytes, format_seconds
from booster_tools.planning import Candidate, Devices, Plan, Planned, StepCost

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def drawn():
    """Return the list of axes that are drawn in a test."""
    found = []
    written = pictures.picture

    @contextlib.contextmanager
    def noted(*args, **options):
        with written(*args, **options) as axes:
            found.extend(axes)
            yield axes

    with mock.patch.object(pictures, "picture", noted):
        yield found


def test_a_curve_passes_through_its_values_and_what_is_not_finite_leaves_a_gap(tmp_path, drawn):
    values = [4.0, 2.0, math.nan, -1.0, math.inf, 3.0, 2.5]
    draw_curve(range(10, 17), values, tmp_path / "out" / "loss.png", title="loss", y_name="nats")
    raw, alone, _ = drawn[0].lines
    assert raw.get_xdata().tolist() == list(range(10, 17))
    assert np.array_equal(raw.get_ydata(), [4.0, 2.0, math.nan, -1.0, math.nan, 3.0, 2.5], equal_nan=True)
    assert (alone.get_xdata().tolist(), alone.get_ydata().tolist()) == ([13], [-1.0])
    assert drawn[0].get_ylabel() == "nats"
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_without_finite_values_raises(tmp_path):
    with pytest.raises(ConfigError, match="None of the 1 values of 'loss' is finite"):
        draw_curve([1], [float("inf")], tmp_path / "a.svg", title="loss", y_name="nats")


def test_a_running_mean_is_that_of_finite_values_at_any_number_of_steps():
    nan = float("nan")
    values = [float(step % 7) for step in range(103)]
    values[10], values[11], values[50], values[70] = nan, nan, nan, 1e30
    for index, mean in enumerate(pictures._running_mean(np.array(values))):
        finite = [value for value in values[max(0, index - 4) : index + 1] if math.isfinite(value)]
        if math.isfinite(values[index]):
            assert mean == pytest.approx(math.fsum(finite) / len(finite))
        else:
            assert math.isnan(mean)


def test_fifty_thousand_points_are_drawn_in_a_second(tmp_path):
    values = np.random.default_rng(0).normal(size=50_000)
    check_picture(tmp_path / "a.png")  # matplotlib itself takes a while to import
    started = time.process_time()
    draw_curve(range(1, 50_001), values, tmp_path / "a.png", title="loss", y_name="nats")
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(("dark", "paper"), [(False, "#ffffff"), (True, "#1e2129")])
def test_pictures_are_light_or_dark_and_the_same_each_time(tmp_path, dark, paper):
    for name in ("a.svg", "b.svg"):
        draw_curve([1, 2], [1.0, 2.0], tmp_path / name, title="loss", y_name="nats", dark=dark)
    assert f"fill: {paper}" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'booster-tools\[pictures\]'"):
        check_picture(tmp_path / "a.png")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (2.5, "2.5 s"), (0.02, "20 ms"), (3e-6, "3 µs")])
def test_times_are_written_as_people_do(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1.5 * GIB, "1.5 GiB")])
def test_bytes_are_written_as_people_do(nbytes, text):
    assert format_bytes(nbytes) == text


def test_memory_is_stacked_above_its_phases_with_its_peak(tmp_path, drawn):
    events = [
        {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "phases"}},
        {"ph": "X", "name": "forward", "tid": 1, "ts": 0.5e6, "dur": 0.5e6},
        {"ph": "X", "name": "backward", "tid": 1, "ts": 1e6, "dur": 1e6},
        *(
            {"ph": "C", "name": "bytes in cpu", "tid": 0, "ts": at * 1e6, "args": {"param": 10 * MIB, **more}}
            for at, more in ((0, {}), (1, {"grad": 30 * MIB}), (2, {}))
        ),
    ]
    draw_memory(events, tmp_path / "a.svg", title="Rank 0")
    _, labels = drawn[0].get_legend_handles_labels()
    assert sorted(labels) == ["backward", "forward", "grad", "param", "peak 40 MiB"]
    assert drawn[0].lines[-1].get_ydata()[0] == 40 * MIB
    assert "peak 40 MiB" in (tmp_path / "a.svg").read_text()
    with pytest.raises(ConfigError, match=r"'Rank 0' has no counters disk, but bytes in cpu\. Perfetto"):
        draw_memory(events, tmp_path / "a.svg", title="Rank 0", counters=["disk"])
    with pytest.raises(ConfigError, match="'Rank 0' has no counters at all"):
        draw_memory(events[:3], tmp_path / "a.svg", title="Rank 0")


def planned(name, peak_gib, memory_gib=4):
    devices = Devices(number=8, memory_bytes=memory_gib * GIB)
    prediction = StepCost(
        world_size=8, rank=0, parameter_bytes=GIB, gradient_bytes=GIB // 2, optimizer_bytes=GIB // 4, other_bytes=0,
        peak_bytes=int(peak_gib * GIB), flops=150 * 10**12,
    )  # fmt: skip
    return Planned(candidate=Candidate(name=name), devices=devices, prediction=prediction)


def test_bars_add_up_to_the_peak_and_what_does_not_fit_is_marked(tmp_path, drawn):
    refused = Planned(candidate=Candidate(name="hybrid"), devices=planned("a", 1).devices, problem="no pipelines")
    draw_plan(Plan(settings=(planned("zero", 3), planned("ddp", 6), refused)), tmp_path / "plan.svg")
    widths = [[bar.get_width() for bar in bars] for bars in drawn[0].containers]
    assert np.sum(widths, axis=0).tolist() == [3 * GIB, 6 * GIB]
    assert widths[2] == [GIB // 4, GIB // 4]
    svg = (tmp_path / "plan.svg").read_text()
    for words in ("3 GiB, 1 s a step<", "6 GiB, 1 s a step, too much<", "memory of a device: 4 GiB", "optimizer state"):
        assert words in svg
    assert "hybrid" not in svg


def test_a_device_with_far_more_memory_does_not_squeeze_the_bars(tmp_path):
    draw_plan(Plan(settings=(planned("zero", 3, memory_gib=80),)), tmp_path / "plan.svg")
    assert "memory of a device" not in (tmp_path / "plan.svg").read_text()


def test_a_plan_without_settings_is_drawn_empty(tmp_path):
    draw_plan(Plan(settings=()), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").exists()
