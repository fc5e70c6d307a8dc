"""Write ``docs/performance.md`` and its pictures from results: ``python benchmarks/_page.py build/bench docs``.

The folder has one ``<benchmark>.jsonl`` for each benchmark, and ``machine.json``, which `describe_machine` returns. The
results are kept in ``docs/assets/performance.json``, from which ``python benchmarks/_page.py docs`` writes the same
page again. The section about GPUs is made of ``docs/assets/gpu-report.json``, the ``report.json`` of ``device_runs``.
The page has other libraries and the bars that are missed; ``docs/tables/performance.csv`` and ``gpu.csv`` have all.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
import os
import platform
import re
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _picture import picture
from _results import Result, in_unit

sys.path.append(str(Path(__file__).parents[1] / "tests" / "shared"))

from device_runs import report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DISTRIBUTIONS = ("torch", "transformers", "accelerate", "lightning-fabric", "deepspeed", "numpy")
_HEAD = """\
# Performance: time and memory of a step, checkpoints, MFU

<!-- Written by `nox -s bench`; do not edit. -->

Each figure is a ratio of ours to a yardstick that was measured in the same run, in turns (A B A B ...): the median over
the rounds. Below 1 ours is faster or smaller, except for speeds and savings, whose bars say "at least".
[Every figure, with quartiles and absolute values](tables/performance.csv). `nox -s bench -- zero` measures those of one
benchmark.

![Time and memory of a step, compared with other libraries](assets/peers.png#only-light)
![Time and memory of a step, compared with other libraries](assets/peers-dark.png#only-dark)
"""
_EMPTY = """
Nothing has been measured yet. `nox -s bench` measures all of it, in about an hour, and writes this page.
"""
_GPU = """
## On a GPU

What one GPU tells: plugins with one rank against a plain loop, offload, and checkpoints, each against the same by hand.
"""
_NO_GPU = """
No report from a GPU has been made yet: all figures above are of CPUs. `python -m device_runs`, with `tests/shared` and
`benchmarks` on `PYTHONPATH`, makes one in eight minutes on a machine with a GPU. Its `report.json` becomes
`docs/assets/gpu-report.json`, of which `python benchmarks/_page.py docs` makes this section.
"""
_PEERS = {
    "time of a step of a Llama of 25M in fp32": (
        ("DDP plugin, to Accelerate", "step of the DDP plugin, Llama 25M, fp32", "Accelerate"),
        ("ZeRO stage 1, to DeepSpeed", "step of the ZeRO plugin, stage 1, Llama 25M, fp32", "DeepSpeed"),
        ("FSDP plugin, to FSDP2 by hand", "step of the FSDP plugin, Llama 25M, fp32", "fully_shard"),
        ("Gemini, to FSDP2 by hand", "step of the Gemini plugin, Llama 25M, fp32", "fully_shard"),
    ),
    "peak memory of a step": (
        ("Gemini, to FSDP2 by hand, fp32", "peak memory of the Gemini plugin, Llama 25M, fp32", "fully_shard"),
        ("the same, bf16", "peak memory of the Gemini plugin, Llama 25M, bf16", "fully_shard"),
        (
            "tensor parallel, to DTensor, fp32",
            "peak memory, tp=2, Llama of 6 layers, hidden 1024, fp32",
            "parallelize_module",
        ),
        ("the same, bf16 ", "peak memory, tp=2, Llama of 6 layers, hidden 1024, bf16", "parallelize_module"),
    ),
}
"""Charts of the first picture: their bars, and what was measured against whom."""
PEERS = (
    *("Accelerate", "DeepSpeed", "Lightning Fabric", "transformers'", "torch.", "DCP"),
    *("DistributedDataParallel", "fully_shard", "parallelize_module", "the plain loop"),
)
"""Yardsticks for which the page shows times and memory even where there is no bar: how their names begin."""
_SHOWN = (
    *("step of", "tp=", "ep=", "peak memory", "time of save_checkpoint", "time of load_checkpoint, warm"),
    *("host time", "calls"),
)
"""What it shows of them where there is no bar: how its name begins."""
_DIFFERS = re.compile(r", (fp32|bf16|\d+ parameters|Llama of \d+ layers)$| under ([\w ]+)(?=, Llama)")
"""The part of a name by which results differ that share a row of a table: a number format, a model, or a plugin."""
_MET, _MISSED, _PLAIN = "#3f9d68", "#d1495b", "#3b7dbd"


def describe_machine() -> dict[str, Any]:
    """Return when and on what the benchmarks run."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, {platform.system()}",
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions,
    }


def read(folder: Path) -> dict[str, Any]:
    """Return the results and the machine of a run."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    return {"machine": machine, "results": [json.loads(line) for line in lines]}


def write(run: dict[str, Any], docs: Path) -> None:
    """Write the page, its pictures, and the results that it shows."""
    results = [Result(**each) for each in run["results"]]
    assets = docs / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    (assets / "performance.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    gpu = read_gpu(docs)
    write_figures(results, docs / "tables" / "performance.csv")
    if gpu is not None:
        write_figures(gpu_figures(gpu), docs / "tables" / "gpu.csv")
    (docs / "performance.md").write_text(page(run["machine"], results, gpu), encoding="utf-8")
    barred = [result for result in results if result.bar is not None]
    charts = {
        title: {
            name: result
            for name, what, yardstick in bars
            for result in results
            if result.what == what and result.yardstick.startswith(yardstick)
        }
        for title, bars in _PEERS.items()
    }
    for look, dark in (("", False), ("-dark", True)):
        if barred:
            draw_ratios(barred, assets / f"performance{look}.svg", dark=dark)
        if all(len(found) == len(_PEERS[title]) for title, found in charts.items()):
            draw_peers(charts, assets / f"peers{look}.png", dark=dark)
        if on_gpus := gpu_ratios(gpu):
            draw_ratios(on_gpus, assets / f"gpu-report{look}.svg", dark=dark)


def read_gpu(docs: Path) -> dict[str, Any] | None:
    """Return the report of a run on GPUs, if there is one."""
    path = docs / "assets" / "gpu-report.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def page(machine: dict[str, Any], results: Sequence[Result], gpu: dict[str, Any] | None) -> str:
    """Return the text of the page."""
    return _HEAD + (_measured(machine, results) if results else _EMPTY) + _GPU + _on_gpus(gpu)


def _on_gpus(gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return _NO_GPU
    lines = [*report.summary(gpu), ""]
    if gpu_ratios(gpu):
        lines += _shown("Each ratio with its quartiles and its bar", "gpu-report")
    figures = gpu_figures(gpu)
    barred = [each for each in figures if each.bar is not None]
    met = sum(each.is_met for each in barred)
    shown = [each for each in barred if not each.is_met]
    missed = " Missed:" if shown else ""
    lines += [f"{met} of {len(barred)} bars are met. [All {len(figures)} figures](tables/gpu.csv).{missed}", ""]
    lines += [*(line.rstrip("\n") for line in _table(shown)), ""]
    for status, title in (("failed", "Failed"), ("left out", "Left out")):
        cases = [case for case in gpu["cases"] if case["status"] == status]
        if cases:
            lines += [f"{title}:", "", *(f"- {case['name']}: {_reason(case['detail'])}" for case in cases), ""]
    return "\n" + "\n".join(lines)


def _reason(detail: str) -> str:
    """Return the line of a case's detail that says most: what was not reached, or the last line of a traceback."""
    lines = [line for line in detail.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("no time was left")), lines[-1] if lines else "")
    told = told[:160].replace("`", "")
    return f"`{told}`" if told else ""


def _measured(machine: dict[str, Any], results: Sequence[Result]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    where = f"{machine['processor']}; {machine['machine']}; Python {machine['python']}"
    later = ", ".join(f"{name} on {date}" for name, date in machine.get("later", {}).items())
    parts = [
        f"\nMeasured on {machine['date']}: {where}, {versions}.{f' Measured again: {later}.' if later else ''}\n\n"
    ]
    missed = [result for result in results if not result.is_met]
    barred = [result for result in results if result.bar is not None]
    parts.append(f"{len(barred) - len(missed)} of {len(barred)} bars are met.\n")
    if barred:
        lines = _shown("Every ratio that has a bar, with its quartiles and its bar", "performance")
        parts += ["\n", *(f"{line}\n" for line in lines[:-1])]
    peers = [
        each
        for each in results
        if each.yardstick.startswith(PEERS) and (each.bar is not None or each.what.startswith(_SHOWN))
    ]
    pipelines = [each for each in results if each.benchmark == "pipeline"]
    others = [each for each in missed if each not in peers and each not in pipelines]
    tables = ("torch and other libraries", peers), ("Pipelines", pipelines), ("Other bars that are missed", others)
    for title, shown in tables:
        parts += [f"\n## {title}\n\n", *_table(shown)] if shown else []
    return "".join(parts)


def _table(results: Sequence[Result]) -> list[str]:
    """Return lines of a table, with a row for each result, or for those that differ in format or plugin alone."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        found = _DIFFERS.search(result.what)
        what = result.what if found is None else result.what.replace(found[0], "", 1)
        bar = "" if result.bar is None else f"{'at least ' if result.at_least else ''}{result.bar:g}"
        median = f"{result.median:.3f}" if result.is_met else f"**{result.median:.3f}, missed**"
        shown = median if found is None else f"{found[1] or found[2]} {median}"
        rows.setdefault((what, result.yardstick, bar), []).append(shown)
    lines = [
        f"| {what} | {yardstick} | {', '.join(medians)} | {bar} |\n" for (what, yardstick, bar), medians in rows.items()
    ]
    return ["| measured | yardstick | ratio | bar |\n", "|---|---|---|---|\n", *lines] if lines else []


def write_figures(results: Sequence[Result], path: Path) -> None:
    """Write every figure as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("benchmark", "measured", "yardstick", "ratio", "quartiles", "bar", "is met", "ours", "theirs", "rounds")
        )
        for each in results:
            has_yardstick = not math.isnan(each.theirs)
            is_number = has_yardstick or not each.unit
            bar = "" if each.bar is None else f"{'at least ' if each.at_least else ''}{each.bar:g}"
            writer.writerow(
                (
                    each.benchmark,
                    each.what,
                    each.yardstick,
                    f"{each.median:.3f}" if is_number else "",
                    f"{each.low:.3f} to {each.high:.3f}" if is_number and each.rounds > 1 else "",
                    bar,
                    "" if each.bar is None else "yes" if each.is_met else "no",
                    _in_unit(each.ours, each.unit),
                    _in_unit(each.theirs, each.unit) if has_yardstick else "",
                    each.rounds,
                )
            )


def _in_unit(value: float, unit: str) -> str:
    return report.in_unit(value, unit) if unit == "tokens/s" or value >= 2**30 else in_unit(value, unit)


def gpu_figures(gpu: dict[str, Any] | None) -> list[Result]:
    """Return the figures of a run on GPUs; ``theirs`` is NaN where there is no yardstick."""
    found = []
    for case in [] if gpu is None else gpu["cases"]:
        for each in case["figures"]:
            medians = {key: statistics.median(each[key]) if each[key] else math.nan for key in ("ours", "theirs")}
            kept = {key: each[key] for key in ("what", "yardstick", "median", "low", "high", "unit", "bar", "at_least")}
            found.append(Result(benchmark=case["name"], rounds=len(each["ours"]), **kept, **medians))
    return found


def gpu_ratios(gpu: dict[str, Any] | None) -> list[Result]:
    """Return those results of a run on GPUs that have a yardstick."""
    return [each for each in gpu_figures(gpu) if not math.isnan(each.theirs)]


def draw_ratios(results: Sequence[Result], path: Path, *, dark: bool) -> None:
    """Draw ratios: the quartiles as a line, the median as a mark, the bar as a tick."""
    title = "Ours to the yardstick: median and quartiles; the tick is the bar; green is met, red is missed"
    highest = max(1.5, *(min(max(result.high, result.bar or 0.0), 4.0) for result in results))
    rows = range(len(results))
    with picture(path, inches=(9.6, 0.8 + 0.2 * len(results)), title=title, dark=dark) as (axes,):
        for row, result in enumerate(results):
            color = _PLAIN if result.bar is None else _MET if result.is_met else _MISSED
            axes.plot((result.low, result.high), (row, row), color=color, linewidth=3)
            axes.plot(min(result.median, highest), row, "s", color=color)
            if result.bar is not None:
                axes.plot(result.bar, row, "|", color=axes.xaxis.label.get_color(), markersize=12, markeredgewidth=2)
        named = [f"{result.what}, to {result.yardstick}" for result in results]
        axes.set_yticks(rows, [name if len(name) < 90 else f"{name[:87]}..." for name in named], fontsize=7)
        axes.axvline(1, color=axes.xaxis.label.get_color(), linewidth=1)
        axes.grid(visible=False, axis="y")
        axes.set(xlim=(0, 1.02 * highest), ylim=(len(results) - 0.5, -0.5))


def draw_peers(charts: Mapping[str, Mapping[str, Result]], path: Path, *, dark: bool) -> None:
    """Draw what a step takes here, as a part of what it takes elsewhere."""
    title = "A step here, as a part of what it takes elsewhere; two CPU processes; shorter is better"
    with picture(path, inches=(8.0, 3.8), title=title, rows=len(charts), dark=dark) as panels:
        for axes, (what, found) in zip(panels, charts.items(), strict=True):
            bars = axes.barh([*found], [result.median for result in found.values()], color=_MET, height=0.6)
            axes.bar_label(bars, fmt=" {:.2f}")
            axes.axvline(1, color=axes.xaxis.label.get_color(), linewidth=1.5)
            axes.grid(visible=False, axis="y")
            axes.invert_yaxis()
            axes.set_title(what, loc="left", fontsize=9)


def _shown(words: str, name: str) -> list[str]:
    """Return lines of Markdown that show a picture, light or dark as the page is."""
    return [f"![{words}](assets/{name}.svg#only-light)", f"![{words}](assets/{name}-dark.svg#only-dark)", ""]


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


if __name__ == "__main__":
    *results_in, pages = map(Path, sys.argv[1:])
    kept = pages / "assets" / "performance.json"
    write(read(results_in[0]) if results_in else json.loads(kept.read_text(encoding="utf-8")), pages)
