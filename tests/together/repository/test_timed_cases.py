"""What a timed case returns where one of its parts fails: the figures of the others."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from device_runs.cases import CannotRun, Figure, Incomplete, Setting
from device_runs.measuring import Clock, Results, in_turns

CPU = Setting("cpu", "gloo", 0, 1, Path())


class Model:
    """Something that takes memory."""


def measure(results, failures):
    models = []

    def build(name):
        model = Model()
        models.append(weakref.ref(model))
        if name in failures:
            raise failures[name]
        results.figures.append(Figure(name, [1.0]))

    for name, attempt in results.attempts(["first", "second", "third"]):
        with attempt:
            build(name)
        gc.collect()
        assert models[-1]() is None, "the next one finds the memory free"
    return results.end()


def test_a_part_that_fails_stops_no_other():
    results = Results(Clock(CPU, 60))
    with pytest.raises(Incomplete, match=r"second:\n(.*\n)*ValueError: no such thing") as found:
        measure(results, {"second": ValueError("no such thing")})
    assert [figure.what for figure in found.value.figures] == ["first", "third"]


def test_a_part_that_cannot_run_is_no_failure():
    results = Results(Clock(CPU, 60))
    assert [figure.what for figure in measure(results, {"first": CannotRun("needs a thing")})] == ["second", "third"]


def test_a_case_of_which_nothing_can_run_is_left_out():
    results = Results(Clock(CPU, 60))
    reasons = {name: CannotRun(f"needs {name}") for name in ("first", "second", "third")}
    with pytest.raises(CannotRun, match="first: needs first; second: needs second; third: needs third"):
        measure(results, reasons)


def test_what_has_no_time_left_is_named():
    results = Results(Clock(Setting("cuda", "gloo", 0, 1, Path()), 0.0))
    with pytest.raises(Incomplete, match="no time was left for first, second, third"):
        measure(results, {})


def test_runs_take_turns():
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "AB"}
    times = in_turns(CPU, runs, 0.0, steps=1, ahead=0)
    assert called == ["A", "B", "A", "B"]
    assert [len(values) for values in times.values()] == [2, 2]
