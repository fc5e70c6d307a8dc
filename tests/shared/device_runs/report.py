"""The report: ``report.md``, ``report.json`` and ``figures.svg``, written after each case."""

from __future__ import annotations

import datetime as dt
import html
import json
import os
import platform
import statistics
from collections import Counter
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_runs.runner import Machine, Outcome

DISTRIBUTIONS = ("torch", "transformers", "triton", "torchao", "numpy")
_SCALES = {"s": (1e3, "ms"), "B": (2**-30, "GiB"), "B/s": (1e-9, "GB/s"), "tokens/s": (1.0, "tokens/s"), "": (1.0, "")}
_ROW, _LEFT, _WIDTH, _TOP = 20, 520, 420, 60
_MET, _MISSED, _PLAIN = "#2f7d4f", "#b3401f", "#1f5a94"


def describe(machine: Machine) -> dict[str, Any]:
    """Return when and on what the cases run."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
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


def write(folder: Path, facts: dict[str, Any], outcomes: Sequence[Outcome], *, is_complete: bool) -> None:
    """Write the report of what has run so far."""
    kept = {"machine": facts, "is_complete": is_complete, "cases": [asdict(outcome) for outcome in outcomes]}
    (folder / "report.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    drawn = picture(kept)
    if drawn is not None:
        (folder / "figures.svg").write_text(drawn, encoding="utf-8")
    (folder / "report.md").write_text(page(kept), encoding="utf-8")


def page(report: dict[str, Any]) -> str:
    """Return the report, what ``report.json`` holds, as Markdown; its picture is ``figures.svg``."""
    cases = report["cases"]
    lines = ["# Booster on a device", "", *summary(report), "", *measured(report, "figures.svg", level=2)]
    lines += ["## Cases", "", "| case | backend | result | seconds |", "|---|---|---|---|"]
    lines += [f"| {case['name']} | {case['backend']} | {case['status']} | {case['seconds']:.1f} |" for case in cases]
    for case in cases:
        if case["status"] == "failed":
            lines += ["", f"### {case['name']}", "", "```", case["detail"], "```"]
    left_out = [case for case in cases if case["status"] == "left out"]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {case['name']}: {case['detail']}" for case in left_out)]
    return "\n".join(lines) + "\n"


def summary(report: dict[str, Any]) -> list[str]:
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


def measured(report: dict[str, Any], picture_path: str, level: int) -> list[str]:
    """Return lines with the picture and a table for each case that measured something; none where none did.

    Args:
        report: What ``report.json`` holds.
        picture_path: The path of the picture.
        level: Of the heading; cases have the next one.
    """
    cases = [case for case in report["cases"] if case["figures"]]
    if not cases:
        return []
    figures = [figure for case in cases for figure in case["figures"]]
    bars = [figure["is_met"] for figure in figures if figure["bar"] is not None]
    lines = [f"{'#' * level} Measured", ""]
    if any(figure["theirs"] for figure in figures):
        lines += [f"![Each ratio with its quartiles and its bar]({picture_path})", ""]
    lines += [
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


def in_unit(value: float, unit: str) -> str:
    """Return a value as people write it."""
    if unit == "s" and value < 1e-3:
        return f"{value * 1e6:.4g} us"
    factor, name = _SCALES[unit]
    return f"{value * factor:.4g} {name}".strip()


def picture(report: dict[str, Any]) -> str | None:
    """Return a drawing of a report's ratios as SVG, if there are any.

    The quartiles are a line, the median is a mark, and the bar a tick.
    """
    figures = [figure for case in report["cases"] for figure in case["figures"] if figure["theirs"]]
    if not figures:
        return None
    highest = max(1.5, *(min(max(each["high"], each["bar"] or 0.0), 4.0) for each in figures))
    bottom = _TOP + _ROW * len(figures)

    def x(ratio: float) -> float:
        return _LEFT + _WIDTH * min(ratio, highest) / highest

    def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(words)}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, color: str, width: int = 1) -> str:
        return (
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'
        )

    width, height = _LEFT + _WIDTH + 40, bottom + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(20, 26, "Ours divided by the yardstick", size=16),
        text(20, 46, "median and quartiles; the black tick is the bar; green is met, red is missed, blue has no bar"),
    ]
    for half in range(int(highest * 2) + 1):
        parts.append(line(x(half / 2), _TOP - 4, x(half / 2), bottom, "#e4e4e4", 2 if half == 2 else 1))
        parts.append(text(x(half / 2), bottom + 16, f"{half / 2:g}", "middle"))
    for place, each in enumerate(figures):
        y = _TOP + _ROW * (place + 0.5)
        color = _PLAIN if each["bar"] is None else _MET if each["is_met"] else _MISSED
        words = f"{each['what']}, to {each['yardstick']}"
        parts.append(text(_LEFT - 10, y + 4, words if len(words) < 84 else f"{words[:81]}...", "end"))
        parts.append(line(x(each["low"]), y, x(each["high"]), y, color, 3))
        parts.append(f'<rect x="{x(each["median"]) - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{color}"/>')
        if each["bar"] is not None:
            parts.append(line(x(each["bar"]), y - 8, x(each["bar"]), y + 8, "#000000", 2))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(figure: dict[str, Any]) -> str:
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


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text(encoding="utf-8").split() if path.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")
