"""The report: ``report.md`` and ``report.json``, written after each case."""

import datetime as dt
import json
import os
import platform
import statistics
from collections import Counter
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

DISTRIBUTIONS = ("torch", "transformers", "triton", "torchao", "numpy")
_SCALES = {"s": (1e3, "ms"), "B": (2**-30, "GiB"), "B/s": (1e-9, "GB/s"), "tokens/s": (1.0, "tokens/s"), "": (1.0, "")}


def describe(machine):
    """Return when and on what the cases run."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    facts = {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "device": machine.device,
        "num_devices": machine.num_devices,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }
    if machine.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "card": properties.name,
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def write(folder, facts, outcomes, *, is_complete):
    """Write the report of what has run so far."""
    kept = {"machine": facts, "is_complete": is_complete, "cases": [asdict(outcome) for outcome in outcomes]}
    (folder / "report.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(page(kept), encoding="utf-8")


def page(report):
    """Return the report, what ``report.json`` holds, as Markdown."""
    cases = report["cases"]
    lines = ["# Booster on a device", "", *summary(report), "", *measured(report, level=2)]
    lines += ["## Cases", "", "| case | backend | result | seconds |", "|---|---|---|---|"]
    lines += [f"| {case['name']} | {case['backend']} | {case['status']} | {case['seconds']:.1f} |" for case in cases]
    for case in cases:
        if case["status"] == "failed":
            lines += ["", f"### {case['name']}", "", "```", case["detail"], "```"]
    left_out = [case for case in cases if case["status"] == "left out"]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {case['name']}: {case['detail']}" for case in left_out)]
    return "\n".join(lines) + "\n"


def summary(report):
    """Return lines that say when and on what a report was made, and how its cases ended."""
    facts = report["machine"]
    counts = Counter(case["status"] for case in report["cases"])
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    where = facts.get("card", "simulated accelerator, whose times mean nothing")
    if "driver" in facts:
        where += f", {facts['memory_bytes'] / 2**30:.0f} GiB; driver {facts['driver']}, NCCL {facts['nccl']}"
    where = f"{facts['num_devices']} x {where}; {facts['cores']} CPU cores; Python {facts['python']}, {versions}"
    ended = f"{counts['passed']} cases passed, {counts['failed']} failed, {counts['left out']} were left out"
    return [
        f"{facts['date']}: {where}.",
        "",
        f"{ended}." if report["is_complete"] else f"{ended}; the others have not run yet.",
        *(["", report["remark"]] if "remark" in report else []),
    ]


def measured(report, level):
    """Return lines with a table for each case that measured something; none where none did.

    Args:
        report: What ``report.json`` holds.
        level: Of the heading; cases have the next one.
    """
    cases = [case for case in report["cases"] if case["figures"]]
    if not cases:
        return []
    figures = [figure for case in cases for figure in case["figures"]]
    bars = [figure["is_met"] for figure in figures if figure["bar"] is not None]
    lines = [
        f"{'#' * level} Measured",
        "",
        "Medians over rounds in turns (A B A B), with quartiles; below 1 ours is faster or smaller, but for bars that",
        f'say "at least". {sum(bars)} of {len(bars)} bars are met.',
        "",
    ]
    for case in cases:
        lines += [
            f"{'#' * (level + 1)} {case['name']}",
            "",
            "| measured | yardstick | ratio | quartiles | bar | ours | theirs | rounds |",
            "|---|---|---|---|---|---|---|---|",
            *map(_row, case["figures"]),
            "",
        ]
    return lines


def in_unit(value, unit):
    """Return a value as people write it."""
    if unit == "s" and value < 1e-3:
        return f"{value * 1e6:.4g} us"
    factor, name = _SCALES[unit]
    return f"{value * factor:.4g} {name}".strip()


def _row(figure):
    bar = "" if figure["bar"] is None else f"{'at least ' if figure['at_least'] else ''}{figure['bar']:g}"
    has_yardstick = bool(figure["theirs"])
    is_number = has_yardstick or not figure["unit"]
    median = f"{figure['median']:.3f}" if is_number else ""
    if not figure["is_met"]:
        median = f"**{median or in_unit(figure['median'], figure['unit'])}, missed**"
    spread = f"{figure['low']:.3f} to {figure['high']:.3f}" if is_number and len(figure["ours"]) > 1 else ""
    cells = [
        figure["what"],
        figure["yardstick"],
        median,
        spread,
        bar,
        in_unit(statistics.median(figure["ours"]), figure["unit"]),
        in_unit(statistics.median(figure["theirs"]), figure["unit"]) if has_yardstick else "",
        str(len(figure["ours"])),
    ]
    return f"| {' | '.join(cells)} |"


def _driver():
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text(encoding="utf-8").split() if path.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
