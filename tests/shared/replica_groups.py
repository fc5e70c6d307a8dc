"""Replica groups for tests: processes that train by `replica_training`, to be killed and restarted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_scripts import torchrun_variables
from free_ports import free_port

SCRIPT = Path(__file__).with_name("replica_training.py")


@dataclass
class Lighthouse:
    """A lighthouse in a process of its own."""

    port: int
    options: tuple[str, ...] = ("--join-timeout", "15")
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        code = "from booster_core.cli import main; main()"
        command = [sys.executable, "-c", code, "lighthouse", "--bind", f"[::]:{self.port}", *self.options]
        self.process = subprocess.Popen(
            command,
            env=_environment({}),
            stdout=subprocess.PIPE,
            stderr=None if "RUST_LOG" in os.environ else subprocess.DEVNULL,
        )
        line = self.process.stdout.readline().decode()
        assert line.startswith("TORCHFT_LIGHTHOUSE=http://"), line

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def _environment(added):
    return {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": os.environ.get("RUST_LOG", "error"), **added}


@dataclass
class Groups:
    """Replica groups of some ranks each.

    Args:
        folder: For logs.
        num_groups: Number of groups.
        ranks: In each group.
        options: Of `replica_training`.
        lighthouse: Where they meet.
    """

    folder: Path
    num_groups: int
    ranks: int
    options: dict[str, Any]
    lighthouse: Lighthouse
    running: dict[int, list[subprocess.Popen[bytes]]] = field(default_factory=dict)

    def start(self, group, **options):
        given = json.dumps({**self.options, **options, "log": str(self.folder)})
        ours = {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": str(self.num_groups)}
        ours["TORCHFT_LIGHTHOUSE"] = self.lighthouse.address
        self.running[group] = []
        for rank, variables in enumerate(torchrun_variables(self.ranks)):
            with (self.folder / f"group{group}-rank{rank}.txt").open("ab") as output:
                command, environment = [sys.executable, str(SCRIPT), given], _environment({**variables, **ours})
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self.running[group].append(process)

    def start_all(self, **options):
        """Start all groups, which take their first step together."""
        for group in range(self.num_groups):
            self.start(group, together=self.num_groups, **options)

    def kill(self, group, ranks=None, sig=signal.SIGKILL):
        for rank, process in enumerate(self.running[group]):
            if ranks is None or rank in ranks:
                process.send_signal(sig)

    def log(self, group, rank=0):
        path = self.folder / f"group{group}-rank{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def steps(self, group, rank=0):
        return [line for line in self.log(group, rank) if line["event"] == "step"]

    def commits(self, group, rank=0):
        return {line["step"]: line for line in self.steps(group, rank) if line["committed"]}

    def trains(self, group):
        """Return whether a group's present process has committed a step."""
        process = self.running[group][0]
        commits = self.commits(group).values()
        return process.poll() is None and any(line["pid"] == process.pid for line in commits)

    def output(self, group, rank=0):
        return (self.folder / f"group{group}-rank{rank}.txt").read_text(errors="replace")

    def wait_for(self, group, step, seconds=60.0):
        """Wait until a group has committed a step."""
        self.wait_until(lambda: step in self.commits(group), seconds, f"group {group} at step {step}")

    def wait_until(self, is_met, seconds, what):
        end = time.time() + seconds
        while not is_met():
            assert time.time() < end, f"not within {seconds} s: {what}\n{self.tails()}"
            time.sleep(0.05)

    def wait_group(self, group, seconds=60.0):
        """Wait until a group has ended, and return its exit codes."""
        self.wait_until(
            lambda: all(process.poll() is not None for process in self.running[group]), seconds, f"the end of {group}"
        )
        return [process.returncode for process in self.running[group]]

    def end_soon(self, more=5):
        """Let all groups end some steps after the last that any has seen."""
        seen = [line["step"] for group in range(self.num_groups) for line in self.steps(group)]
        whole = self.folder / "end.tmp"
        whole.write_text(str(max(seen) + more))
        whole.rename(self.folder / "end")

    def wait_all(self, seconds=60.0):
        for group in self.running:
            assert self.wait_group(group, seconds) == [0] * self.ranks, self.tails()

    def tails(self):
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.txt"))
        )

    def close(self):
        for process in (process for group in self.running.values() for process in group):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextlib.contextmanager
def replica_groups(folder, num_groups, ranks=1, *, lighthouse=("--join-timeout", "15"), **options):
    """Yield groups that are not started yet, and end all of them afterwards."""
    light = Lighthouse(free_port(), options=lighthouse)
    light.start()
    groups = Groups(folder, num_groups, ranks, options, light)
    try:
        yield groups
    finally:
        groups.close()
        light.kill()
