"""Try all that plugins need, and say what is slow or broken.

Each process runs `booster_tools.cli._doctor_rank`; this module starts them, ends them at the time limit, and reports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click

from booster_core.ranks import choose_backend, describe_devices
from booster_tools.local_ports import free_port

WORLD_SIZE = 2


@dataclass(frozen=True)
class Finding:
    """What a check found: ``ok``, ``slow`` or ``FAIL``, and why."""

    state: str
    detail: str = ""


@click.command()
@click.option(
    "--timeout", "timeout_seconds", default=60.0, show_default=True, help="Time limit of a backend in seconds."
)
@click.option("--backend", help="Only this backend, such as gloo or nccl.  [default: each usable one]")
@click.option("--folder", type=click.Path(exists=True, file_okay=False), help="Where to write; the shared file system.")
@click.option("--strict", "is_strict", is_flag=True, help="Exit with 1 for what is slow as well.")
def command(*, timeout_seconds: float, backend: str | None, folder: str | None, is_strict: bool) -> None:
    """Try all that plugins need with two processes, and say what is slow or broken.

    The exit status is 1 if anything fails or hangs.
    """
    for line in _devices():
        click.echo(line)
    backends = [backend] if backend else _usable_backends()
    states: Counter[str] = Counter()
    for each in backends:
        click.echo(f"{each}, {WORLD_SIZE} processes:")
        for name, finding in run_checks(each, timeout_seconds, folder).items():
            click.echo(f"  {finding.state:4}  {name}{finding.detail and ': ' + finding.detail}")
            states[finding.state] += 1
    if states["FAIL"] or not backends:
        click.echo("Training on several ranks will not work here." if backends else "This torch has no backend.")
        raise SystemExit(1)
    if states["slow"]:
        click.echo("All plugins work; what is slow costs time.")
        raise SystemExit(int(is_strict))
    click.echo("Everything that the plugins need works.")


def run_checks(backend: str, timeout_seconds: float, folder: str | None = None) -> dict[str, Finding]:
    """Run every check in two processes.

    Args:
        backend: Backend of `torch.distributed`.
        timeout_seconds: Time limit over all checks; processes that take longer are ended.
        folder: Where to make the temporary folder that both write into.

    Returns:
        What was found, for each check that was reached, in order; the worse one where ranks differ.

    Collective: none; it starts ranks of its own.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="booster-doctor-") as shared:
        home = Path(shared)
        processes = []
        port = free_port()
        for rank in range(WORLD_SIZE):
            arguments = [str(rank), str(WORLD_SIZE), backend, str(home), str(port)]
            with (home / f"out-{rank}").open("wb") as out, (home / f"err-{rank}").open("wb") as err:
                command_line = [sys.executable, "-m", "booster_tools.cli._doctor_rank", *arguments]
                processes.append(subprocess.Popen(command_line, stdout=out, stderr=err))  # noqa: S603 - our own module
        _wait(processes, timeout_seconds)
        findings: dict[str, Finding] = {}
        for rank, process in enumerate(processes):
            text = (home / f"out-{rank}").read_text(encoding="utf-8", errors="replace")
            states = _last_states(text)
            if not states:
                lines = (home / f"err-{rank}").read_text(encoding="utf-8", errors="replace").strip().splitlines()
                states = {"start": ("failed", lines[-1] if lines else f"exit status {process.returncode}")}
            for name, (state, detail) in states.items():
                if state in _SEVERITY[:-1]:
                    found = Finding(state, detail)
                else:
                    late = f"did not return within {timeout_seconds:g} s"
                    found = Finding("FAIL", f"rank {rank}: {detail if state == 'failed' else late}")
                before = findings.setdefault(name, found)
                if _SEVERITY.index(found.state) > _SEVERITY.index(before.state):
                    findings[name] = found
        return findings


_SEVERITY = ("ok", "slow", "FAIL")


def _devices() -> list[str]:
    """Return a line for each device, and one where they are too few for the backend of their collectives."""
    lines = [f"{name}: {what}" for name, what in describe_devices().items()]
    if 0 < len(lines) < WORLD_SIZE:
        lines.append(f"{_backend_of_devices()}: not tried, because it needs {WORLD_SIZE} devices, one for each process")
    return lines or ["no GPU or other accelerator: torch sees CPUs only"]


def _usable_backends() -> list[str]:
    from torch import distributed

    backends = ["gloo"] if distributed.is_gloo_available() else []
    if len(describe_devices()) >= WORLD_SIZE:
        backends.append(_backend_of_devices())
    return backends


def _backend_of_devices() -> str:
    """Return the name of the backend that a launch adds for the accelerator."""
    return choose_backend(None).rpartition(":")[2]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_seconds: float) -> None:
    """Wait for all processes, and end those that are still there at the time limit."""
    deadline = time.monotonic() + timeout_seconds
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_states(text: str) -> dict[str, tuple[str, str]]:
    """Return the last state and detail of each check that a rank's lines tell of."""
    states: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            states[entry["check"]] = (entry["state"], entry["detail"])
        except (ValueError, KeyError, TypeError):
            continue  # a backend that prints, or a line cut short when its process was ended
    return states
