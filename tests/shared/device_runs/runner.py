"""Run cases, each in processes of its own, so that one that fails, hangs or ends its process stops no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from free_ports import free_port

from device_runs.cases import CannotRun, Case, Incomplete, Setting, all_cases

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

_LAST_LINES = 40
_LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Machine:
    """What cases run on.

    Attributes:
        device: Device type.
        num_devices: How many of them.
        library: The simulated accelerator's library; empty for CUDA.
        side_by_side: How many ranks run at a time, of cases that are not timed.
    """

    device: str
    num_devices: int
    library: str = ""
    side_by_side: int = 8

    def backend_of(self, case):
        """Return the backend of a case's process group.

        NCCL refuses two ranks on one device, so ranks that share one talk over the staged backend.
        """
        if case.ranks > self.num_devices:
            return f"cpu:gloo,{self.device}:staged"
        return "cpu:gloo,simulated:simccl" if self.library else "cpu:gloo,cuda:nccl"


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        name: The case.
        status: ``"passed"``, ``"failed"``, or ``"left out"`` where it can't run.
        detail: Why it failed or was left out, with the last lines of the rank that failed first.
        seconds: How long it took.
        figures: What it measured.
        backend: Of its process group.
    """

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)
    backend: str = ""


@dataclass
class _Running:
    case: Case
    backend: str
    folder: Path
    ranks: list[Any]
    pipes: list[Connection]
    started: float = field(default_factory=time.monotonic)
    answers: dict[int, tuple[str, Any]] = field(default_factory=dict)

    @property
    def deadline(self):
        return self.started + self.case.seconds


def run(cases, machine, folder, seconds, tell):
    """Run cases and return how each ended, in the order in which they did.

    Args:
        cases: Those that are not timed run side by side, for half of the time; then the others, alone; then the rest.
        machine: What they run on.
        folder: For the output of ranks, ``<case>.<rank>.txt``.
        seconds: Cases that have not begun by then are left out, and those that run are ended.
        tell: Called after each case.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["device_runs.preload"])
    passes = _Passes(context, machine, folder, time.monotonic() + seconds, tell)
    untimed, timed = [case for case in cases if not case.is_timed], [case for case in cases if case.is_timed]
    if timed:
        passes.go(untimed, machine.side_by_side, until=passes.end - seconds / 2)
    passes.go(timed, 1)
    passes.go(untimed, machine.side_by_side)
    return passes.outcomes


class _Passes:
    """Cases that run one after the other, or side by side, until the time is over."""

    def __init__(self, context, machine, folder, end, tell):
        self._context, self._machine, self._folder, self._tell = context, machine, folder, tell
        self.end = end
        self.outcomes = []

    def go(self, waiting, limit, until=None):
        """Run cases, at most ``limit`` ranks at a time; those that have not begun by ``until`` stay in the list."""
        running = []
        while running or (waiting and (until is None or time.monotonic() <= until)):
            while waiting and _fits(waiting[0], running, limit) and (until is None or time.monotonic() <= until):
                self._begin(waiting.pop(0), running)
            self._end_some(running)

    def _begin(self, case, running):
        if case.only_on not in ("", self._machine.device):
            self._done(Outcome(case.name, "left out", f"needs a {case.only_on} device"))
        elif time.monotonic() > self.end:
            self._done(Outcome(case.name, "left out", "the time was over"))
        else:
            running.append(_start(self._context, case, self._machine, self._folder))

    def _end_some(self, running):
        for each in running:
            _listen(each)
        ended = [each for each in running if _has_ended(each) or time.monotonic() > min(each.deadline, self.end)]
        for each in ended:
            running.remove(each)
            outcome = _end(each, self._folder)
            if outcome.status == "failed" and not each.answers and time.monotonic() > self.end:
                outcome.status, outcome.detail = "left out", "the time was over before it ended"
            self._done(outcome)
        if running and not ended:
            time.sleep(0.02)

    def _done(self, outcome):
        self.outcomes.append(outcome)
        self._tell(outcome)


def _fits(case, running, limit):
    return not running or sum(each.case.ranks for each in running) + case.ranks <= limit


def _start(context, case, machine, folder):
    shared = folder / "shared" / _as_file(case.name)
    shutil.rmtree(shared, ignore_errors=True)
    shared.mkdir(parents=True)
    backend = machine.backend_of(case)
    port = free_port()
    ranks, pipes = [], []
    for rank in range(case.ranks):
        ours, theirs = context.Pipe(duplex=False)
        device = Setting(machine.device, backend, rank, case.ranks, shared, machine.library)
        output = folder / f"{_as_file(case.name)}.{rank}.txt"
        process = context.Process(target=_be_rank, args=(case.name, device, machine, port, output, theirs))
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(ours)
    return _Running(case, backend, shared, ranks, pipes)


def _listen(running):
    for rank, pipe in enumerate(running.pipes):
        with contextlib.suppress(EOFError, OSError):
            if rank not in running.answers and pipe.poll():
                running.answers[rank] = pipe.recv()


def _has_ended(running):
    failed = any(kind == "failed" for kind, _ in running.answers.values())
    return failed or all(not process.is_alive() for process in running.ranks)


def _end(running, folder):
    _listen(running)
    is_late = any(process.is_alive() and rank not in running.answers for rank, process in enumerate(running.ranks))
    for process in running.ranks:
        process.join(timeout=5 if len(running.answers) == len(running.ranks) else 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group, with the processes that it started
        process.join()
    for pipe in running.pipes:
        pipe.close()
    shutil.rmtree(running.folder, ignore_errors=True)
    case = running.case
    outcome = Outcome(case.name, "passed", seconds=time.monotonic() - running.started, backend=running.backend)
    kinds = {kind for kind, _ in running.answers.values()}
    if "failed" in kinds:
        rank, answer = next((rank, answer) for rank, (kind, answer) in running.answers.items() if kind == "failed")
        text, outcome.figures = answer
        outcome.status, outcome.detail = "failed", f"rank {rank}:\n{text}"
    elif len(running.answers) < len(running.ranks):
        silent = [rank for rank in range(len(running.ranks)) if rank not in running.answers]
        codes = [process.exitcode for process in running.ranks]
        why = f"did not end within {case.seconds:g} s" if is_late else f"ended without an answer, exit codes {codes}"
        last = "\n".join(
            f"rank {rank}:\n{_last_lines(folder / f'{_as_file(case.name)}.{rank}.txt')}" for rank in silent
        )
        outcome.status, outcome.detail = "failed", f"ranks {silent} {why}\n{last}"
    elif "left out" in kinds:
        outcome.status, outcome.detail = (
            "left out",
            next(text for kind, text in running.answers.values() if kind == "left out"),
        )
    else:
        outcome.figures = running.answers[0][1]
    return outcome


def _be_rank(name, setting, machine, port, output, pipe):
    """Run a case's function on one rank, and send how it ended."""
    os.setsid()
    _redirect(output)
    warnings.simplefilter("default")
    case = all_cases()[name]
    try:
        figures = _call(case, setting, machine, port)
    except CannotRun as reason:
        pipe.send(("left out", str(reason)))
    except Incomplete as found:
        print(found, file=sys.stderr)
        pipe.send(("failed", (str(found), [figure.as_json() for figure in found.figures])))
    except BaseException:  # noqa: BLE001 - told by the report
        traceback.print_exc()
        pipe.send(("failed", ("\n".join(traceback.format_exc().splitlines()[-_LAST_LINES:]), [])))
    else:
        pipe.send(("passed", [figure.as_json() for figure in figures]))
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed may hold threads of communicators that wait for others.
    os._exit(0)


def _call(case, setting, machine, port):
    import faulthandler

    import torch

    import booster_core

    faulthandler.dump_traceback_later(max(case.seconds - 5.0, 1.0))
    if machine.library:
        from simulated_device import load

        load(machine.library)
    if "staged" in setting.backend:
        from device_runs import staged

        staged.register(machine.device)
    if machine.device == "cuda":
        torch.cuda.set_device(setting.rank % machine.num_devices)
    booster_core.launch(
        setting.rank,
        setting.world_size,
        "localhost",
        port,
        backend=setting.backend,
        local_rank=setting.rank,
        verbose=False,
        timeout_seconds=_LIMIT_SECONDS,
    )
    figures = case.function(setting, **case.options) or ()
    booster_core.shutdown()
    faulthandler.cancel_dump_traceback_later()
    return figures


def _redirect(output):
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _last_lines(path):
    if not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])


def _as_file(name):
    return "".join(each if each.isalnum() else "_" for each in name)
