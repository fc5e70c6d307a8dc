"""Try out this machine's collectives with two processes, and say what works.

Each process runs `booster_runtime.cli._doctor_rank`; this module starts them, ends them at the time limit, and reports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

WORLD_SIZE = 2


@click.command()
@click.option(
    "--timeout", "timeout_seconds", default=60.0, show_default=True, help="Time limit of a backend in seconds."
)
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="Only this backend.  [default: each usable one]")
@click.option("--folder", type=click.Path(exists=True, file_okay=False), help="Where to write; the shared file system.")
def command(*, timeout_seconds: float, backend: str | None, folder: str | None) -> None:
    """Try out this machine's collectives with two processes, and say what works.

    The exit status is 1 if anything fails or hangs.
    """
    backends = [backend] if backend else _usable_backends()
    healthy = True
    for each in backends:
        click.echo(f"{each}, {WORLD_SIZE} processes:")
        for name, problem in run_checks(each, timeout_seconds, folder).items():
            click.echo(f"  {'ok  ' if problem is None else 'FAIL'}  {name}{'' if problem is None else ': ' + problem}")
            healthy = healthy and problem is None
    if not healthy:
        raise SystemExit(1)
    click.echo("Everything that the plugins need works.")


def run_checks(backend: str, timeout_seconds: float, folder: str | None = None) -> dict[str, str | None]:
    """Run every check in two processes.

    Args:
        backend: Backend of `torch.distributed`.
        timeout_seconds: Time limit over all checks; processes that take longer are ended.
        folder: Where to make the temporary folder that both write into.

    Returns:
        For each check that was reached, in order, what is wrong, or ``None``.

    Collective: none; it starts ranks of its own.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="booster-doctor-") as shared:
        home = Path(shared)
        processes = []
        for rank in range(WORLD_SIZE):
            arguments = [str(rank), str(WORLD_SIZE), backend, str(home)]
            with (home / f"out-{rank}").open("wb") as out, (home / f"err-{rank}").open("wb") as err:
                command_line = [sys.executable, "-m", "booster_runtime.cli._doctor_rank", *arguments]
                processes.append(subprocess.Popen(command_line, stdout=out, stderr=err))  # noqa: S603 - our own module
        _wait(processes, timeout_seconds)
        problems: dict[str, str | None] = {}
        for rank, process in enumerate(processes):
            text = (home / f"out-{rank}").read_text(encoding="utf-8", errors="replace")
            states = _last_states(text)
            if not states:
                lines = (home / f"err-{rank}").read_text(encoding="utf-8", errors="replace").strip().splitlines()
                states = {"start": ("failed", lines[-1] if lines else f"exit status {process.returncode}")}
            for name, (state, detail) in states.items():
                problem = {"ok": None, "failed": detail}.get(state, f"did not return within {timeout_seconds:g} s")
                problems[name] = problems.get(name) or (None if problem is None else f"rank {rank}: {problem}")
        return problems


def _usable_backends() -> list[str]:
    import torch
    from torch import distributed

    backends = ["gloo"] if distributed.is_gloo_available() else []
    if distributed.is_nccl_available() and torch.cuda.device_count() >= WORLD_SIZE:
        backends.append("nccl")
    return backends


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
