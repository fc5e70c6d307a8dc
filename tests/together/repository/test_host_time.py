"""What Python does in a step does not grow with the number of ranks, by the benchmark of host time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def host_time(monkeypatch):
    """Return the benchmark, which plays one rank of many."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import host_time

    yield host_time
    for name in [name for name in sys.modules if name.partition(".")[0] in ("host_time", "device_speed", "_results")]:
        del sys.modules[name]


def test_no_plugin_calls_more_functions_on_1024_ranks_than_on_8(host_time):
    names = tuple(dict.fromkeys(ours for ours, _ in host_time.BARS))
    seconds, few = host_time.measure("8 parameters", 8, names, 1, "")
    _, many = host_time.measure("8 parameters", 1024, names, 0, "")
    assert {name: [*parts] for name, parts in seconds.items()} == {name: [*host_time.PARTS] for name in names}
    grown = {name: sum(many[name].values()) / sum(few[name].values()) for name in names}
    assert {name: ratio for name, ratio in grown.items() if ratio > host_time.GROWTH_BAR} == {}


def test_the_optimizer_steps_on_plain_views_under_fsdp(host_time):
    ours = "fsdp, a unit a layer"
    _, calls = host_time.measure("200 parameters", 8, (host_time.PLAIN, ours), 0, "")
    assert calls[ours]["step"] <= 1.3 * calls[host_time.PLAIN]["step"]
