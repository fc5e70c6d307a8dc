"""The picture of a plan: a bar for each planned setting, and the line of a device's memory."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from booster_tools.cli.plan import command
from booster_tools.planning import Candidate, Devices, Plan, Planned, Prediction, draw_plan

GIB = 1 << 30


def planned(name, peak_gib, memory_gib=4):
    devices = Devices(number=8, memory_bytes=memory_gib * GIB)
    prediction = Prediction(
        world_size=8, rank=0, parameter_bytes=GIB, gradient_bytes=GIB // 2, optimizer_bytes=GIB // 4, other_bytes=0,
        peak_bytes=int(peak_gib * GIB), flops=150 * 10**12,
    )  # fmt: skip
    return Planned(candidate=Candidate(name=name), devices=devices, prediction=prediction)


def test_bars_add_up_to_the_peak_and_what_does_not_fit_is_marked():
    refused = Planned(candidate=Candidate(name="hybrid"), devices=planned("a", 1).devices, problem="no pipelines")
    svg = draw_plan(Plan(settings=(planned("zero", 3), planned("ddp", 6), refused)))
    widths = [
        [float(width) for width, title in re.findall(r"width='([\d.]+)'[^>]*><title>([^<]*)", row) if "B" in title]
        for row in svg.split("zero")[1].split("ddp")
    ]
    # 3 GiB and 6 GiB on one scale
    assert sum(widths[1]) == pytest.approx(2 * sum(widths[0]), abs=0.1)
    assert "<title>optimizer state: 256 MiB</title>" in svg
    assert "3 GiB, 1 s a step<" in svg
    assert "6 GiB, 1 s a step, too much<" in svg
    assert "memory of a device: 4 GiB" in svg
    assert "hybrid" not in svg


def test_a_device_with_far_more_memory_does_not_squeeze_the_bars():
    assert "memory of a device" not in draw_plan(Plan(settings=(planned("zero", 3, memory_gib=80),)))


def test_a_plan_without_settings_is_drawn_empty():
    assert draw_plan(Plan(settings=())).startswith("<svg")


def test_other_formats_are_refused_before_anything_is_planned():
    result = CliRunner().invoke(command, ["missing.py:build", "--devices=2", "--memory=1GiB", "--picture=plan.gif"])
    assert result.exit_code == 2
    assert "`--picture plan.gif` must end in .svg or .png." in result.output
