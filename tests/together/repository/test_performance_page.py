"""The page of benchmarks: one form of results, and a page and picture made of recorded ones."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).with_name("benchmark_results.json")


@pytest.fixture
def benchmarks(monkeypatch):
    """Return the modules of benchmarks/ that make results and the page."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _page
    import _results

    yield _page, _results
    for name in ("_page", "_results"):
        del sys.modules[name]


def test_a_result_is_the_ratio_of_each_round(benchmarks, tmp_path, monkeypatch, capsys):
    _, results = benchmarks
    path = tmp_path / "zero.jsonl"
    monkeypatch.setenv("BOOSTER_BENCH_RESULTS", str(path))
    # the third round was disturbed: both took ten times as long, and the ratio stays
    ours, theirs = [0.9, 1.1, 10.0, 1.0, 1.2], [1.0, 1.0, 10.0, 1.0, 1.0]
    assert results.compare("a step", ours, theirs, yardstick="DDP", bar=1.0)
    assert not results.compare("a step", ours, theirs, yardstick="DDP", bar=0.99)
    assert not results.compare("saved", [50], [100], yardstick="the formula", bar=0.9, at_least=True, unit="B")
    first, second, third = (results.Result(**json.loads(line)) for line in path.read_text().splitlines())
    assert (first.median, first.low, first.high, first.rounds) == (1.0, 1.0, pytest.approx(1.1), 5)
    assert (first.ours, first.theirs, first.benchmark) == (1.1, 1.0, "zero")
    assert [each.is_met for each in (first, second, third)] == [True, False, False]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == (
        "a step, to DDP: 1.000 (quartiles 1.000 to 1.100; 1100 ms to 1000 ms over 5 rounds; bar <= 0.99, missed)"
    )


def test_the_page_shows_each_recorded_result(benchmarks, tmp_path):
    page, _ = benchmarks
    run = json.loads(RECORDED.read_text(encoding="utf-8"))
    page.write(run, tmp_path)
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert "Measured on 2026-01-02: A processor; x86_64, 2 cores, 24 GiB, Linux; Python 3.11.7, torch 2.13.0." in text
    assert "2 of 3 bars are met." in text
    assert "| step of the ZeRO plugin | DistributedDataParallel | 0.900 | 0.95 |" in text
    assert "| **0.800, missed** | at least 0.9 |" in text
    with (tmp_path / "tables" / "performance.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["benchmark"] for row in rows] == [each["benchmark"] for each in run["results"]]
    (step,) = (row for row in rows if row["measured"] == "step of the ZeRO plugin")
    assert (step["quartiles"], step["is met"]) == ("0.880 to 0.930", "yes")
    assert (step["ours"], step["theirs"], step["rounds"]) == ("90 ms", "100 ms", "8")
    assert json.loads((tmp_path / "assets" / "performance.json").read_text()) == run
    for name in ("performance.svg", "performance-dark.svg"):
        assert "step of the ZeRO plugin" in (tmp_path / "assets" / name).read_text(encoding="utf-8")


def test_the_page_without_results_says_how_to_measure(benchmarks, tmp_path):
    page, _ = benchmarks
    page.write({"machine": {}, "results": []}, tmp_path)
    assert "Nothing has been measured yet." in (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert not (tmp_path / "assets" / "performance.svg").exists()


def gpu_report(is_missed):
    """Return a report of two cases on a card: one measured something, the other failed."""
    bar = 1.02 if is_missed else 1.2
    figure = {"what": "step of zero 1", "yardstick": "the plain loop", "unit": "s", "bar": bar, "at_least": False}
    figure |= {"ours": [0.11, 0.1, 0.12], "theirs": [0.1, 0.1, 0.1], "median": 1.1, "low": 1.05, "high": 1.15}
    case = {"seconds": 3.0, "detail": "", "backend": "cpu:gloo,cuda:nccl", "figures": []}
    return {
        "machine": {
            "date": "2026-01-03",
            "num_devices": 1,
            "card": "A card",
            "memory_bytes": 80 * 2**30,
            "driver": "580.1",
            "nccl": "2.28.9",
            "cores": 16,
            "python": "3.12.3",
            "versions": {"torch": "2.11.0+cu130"},
        },
        "is_complete": True,
        "cases": [
            {**case, "name": "speed", "status": "passed", "figures": [{**figure, "is_met": not is_missed}]},
            {
                **case,
                "name": "gemini, fp16",
                "status": "failed",
                "detail": "rank 0:\nTraceback:\nAssertionError: no `x`",
            },
        ],
    }


@pytest.mark.parametrize("is_missed", [False, True])
def test_the_page_shows_the_report_of_a_gpu(benchmarks, tmp_path, is_missed):
    page, _ = benchmarks
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "gpu-report.json").write_text(json.dumps(gpu_report(is_missed)), encoding="utf-8")
    page.write(json.loads(RECORDED.read_text(encoding="utf-8")), tmp_path)
    section = (tmp_path / "performance.md").read_text(encoding="utf-8").partition("## On a GPU")[2]
    where = "1 x A card, 80 GiB; driver 580.1, NCCL 2.28.9; 16 CPU cores; Python 3.12.3, torch 2.11.0+cu130"
    assert f"2026-01-03: {where}." in section
    assert "1 cases passed, 1 failed, 0 were left out." in section
    assert "Failed:\n\n- gemini, fp16: `AssertionError: no x`" in section
    assert f"{int(not is_missed)} of 1 bars are met." in section
    assert ("| step of zero 1 | the plain loop | **1.100, missed** | 1.02 |" in section) == is_missed
    figures = (tmp_path / "tables" / "gpu.csv").read_text(encoding="utf-8")
    assert "speed,step of zero 1,the plain loop,1.100,1.050 to 1.150," in figures
    assert ",110 ms,100 ms,3" in figures
    assert "(assets/gpu-report-dark.svg#only-dark)" in section
    assert "step of zero 1" in (tmp_path / "assets" / "gpu-report.svg").read_text(encoding="utf-8")


def test_the_page_says_where_no_gpu_has_been_measured(benchmarks, tmp_path):
    page, _ = benchmarks
    page.write(json.loads(RECORDED.read_text(encoding="utf-8")), tmp_path)
    assert "No report from a GPU has been made yet" in (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert not (tmp_path / "assets" / "gpu-report.svg").exists()


def test_the_documented_page_and_tables_are_made_of_their_results(benchmarks, tmp_path):
    page, results = benchmarks
    run = json.loads((ROOT / "docs" / "assets" / "performance.json").read_text(encoding="utf-8"))
    gpu = page.read_gpu(ROOT / "docs")
    measured = [results.Result(**each) for each in run["results"]]
    expected = page.page(run["machine"], measured, gpu)
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == expected
    for name, figures in (("performance", measured), ("gpu", page.gpu_figures(gpu))):
        page.write_figures(figures, tmp_path / f"{name}.csv")
        assert (ROOT / "docs" / "tables" / f"{name}.csv").read_bytes() == (tmp_path / f"{name}.csv").read_bytes()
    assert (ROOT / "docs" / "assets" / "gpu-report.svg").exists() == bool(page.gpu_ratios(gpu))


def test_each_benchmark_has_a_smallest_run(benchmarks, monkeypatch):
    import _run

    assert set(_run.BENCHMARKS) == set(_run.SMALLEST)
    assert set(_run.CASES) <= set(_run.BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["_run.py", "no_such"])
    with pytest.raises(SystemExit):
        _run.main()
    del sys.modules["_run"]
