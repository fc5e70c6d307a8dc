"""What Python does in a step, a launch and a mesh does not grow with the number of ranks, by benchmarks."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmark(monkeypatch):
    """Return a function that imports a benchmark, which plays one rank of many."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_no_plugin_calls_more_functions_on_1024_ranks_than_on_8(benchmark):
    host_time = benchmark("host_time")
    names = tuple(dict.fromkeys(ours for ours, _ in host_time.BARS))
    seconds, few = host_time.measure("8 parameters", 8, names, 1, "")
    _, many = host_time.measure("8 parameters", 1024, names, 0, "")
    assert {name: [*parts] for name, parts in seconds.items()} == {name: [*host_time.PARTS] for name in names}
    grown = {name: sum(many[name].values()) / sum(few[name].values()) for name in names}
    assert {name: ratio for name, ratio in grown.items() if ratio > host_time.GROWTH_BAR} == {}


def test_the_optimizer_steps_on_plain_views_under_fsdp(benchmark):
    host_time, ours = benchmark("host_time"), "fsdp, a unit a layer"
    _, calls = host_time.measure("200 parameters", 8, (host_time.PLAIN, ours), 0, "")
    assert calls[ours]["step"] <= 1.3 * calls[host_time.PLAIN]["step"]


def test_requests_and_groups_are_as_many_with_1024_ranks_as_with_64(benchmark):
    scale = benchmark("_scale")
    of_sizes = []
    for size in (64, 1024):
        said = []
        of_sizes.append([scale.launch_and_boost(rank, size, said) for rank in (0, size - 1)])
    few, many = of_sizes
    assert [each.num_requests for each in few] == [each.num_requests for each in many]
    assert max(each.num_groups for each in (*few, *many)) <= 11, "of axes and products of them, not of ranks"
    assert max(each.num_requests for each in many) <= scale.NUM_REQUESTS
