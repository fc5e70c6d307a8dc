"""Run tests with a mutant in the place of a module, in a child process that has torch imported already."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Sequence
    from types import CodeType

    from mutation.mutants import Mutant
    from mutation.targets import Target

_PATIENCE = 4
"""How many times as long as the longest test without a mutant any test may compute. A mutant that hangs is found."""
_LEAST_SECONDS = 3.0
_MOST_SECONDS = 600.0
"""For how long tests may compute without a mutant."""
_WAITING_SECONDS = 1800
"""For how long tests may run at all: those of a mutant whose ranks wait for each other, or on a busy machine."""
_MEMORY_BYTES = 8 << 30


@dataclass(frozen=True)
class Run:
    """How the tests ended.

    Args:
        passed: Whether all of them did.
        output: The end of what pytest printed.
    """

    passed: bool
    output: str

    @property
    def longest_seconds(self) -> float:
        """For how long the longest test computed; the last line tells."""
        return float(self.output.rsplit(maxsplit=1)[1])


def import_what_tests_need() -> None:
    """Import what takes long, so that child processes have it."""
    import gc

    import hypothesis
    import numpy  # noqa: F401, ICN001
    import pytest  # noqa: F401
    import torch.distributed
    import torch.optim  # noqa: F401

    import booster_testing  # noqa: F401 - tests/conftest.py imports it

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # which reads the metadata of each installed distribution

    # The same examples for each mutant. Nobody reads the smallest one.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutation")
    gc.collect()
    gc.freeze()  # pytest collects all garbage, several times


def run_all(target: Target, mutants: Sequence[Mutant], tree: ast.Module, num_workers: int) -> Iterator[tuple[int, Run]]:
    """Run the target's tests with each mutant, and yield the mutant's position with the outcome.

    Args:
        target: The module and its tests.
        mutants: What to plant; each child process plants one.
        tree: The module's syntax tree, which the mutants change.
        num_workers: How many child processes run at a time.

    Raises:
        RuntimeError: If the tests fail without a mutant.
    """
    before = _finish(*_start(target, None, tree, _MOST_SECONDS))
    if not before.passed:
        msg = f"The tests of {target.module} fail without a mutant:\n{before.output}"
        raise RuntimeError(msg)
    limit = max(before.longest_seconds * _PATIENCE, _LEAST_SECONDS)
    todo = list(enumerate(mutants))[::-1]
    running: dict[int, tuple[int, int]] = {}
    while todo or running:
        while todo and len(running) < num_workers:
            position, mutant = todo.pop()
            pid, log = _start(target, mutant, tree, limit)
            running[pid] = position, log
        pid, status = os.wait()
        position, log = running.pop(pid)
        yield position, _outcome(status, log)


def _start(target: Target, mutant: Mutant | None, tree: ast.Module, limit: float) -> tuple[int, int]:
    """Fork a process that runs the tests; return its id and the file that holds its output."""
    log = os.memfd_create("pytest")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            os._exit(_run_tests(target, mutant, tree, limit))
        except BaseException:  # noqa: BLE001 - this process has no other way out
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    return pid, log


def _finish(pid: int, log: int) -> Run:
    _, status = os.waitpid(pid, 0)
    return _outcome(status, log)


def _outcome(status: int, log: int) -> Run:
    size = os.fstat(log).st_size
    output = os.pread(log, 4000, max(size - 4000, 0)).decode(errors="replace")
    os.close(log)
    return Run(os.waitstatus_to_exitcode(status) == 0, output)


def _run_tests(target: Target, mutant: Mutant | None, tree: ast.Module, limit: float) -> int:
    import pytest

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    present = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + _MEMORY_BYTES,) * 2)
    signal.alarm(_WAITING_SECONDS)
    if mutant is not None:
        mutant.plant()
        if target.module in sys.modules:  # what uses it has to be imported once more as well
            for name in [name for name in sys.modules if name.startswith("booster_")]:
                del sys.modules[name]
        sys.meta_path.insert(0, _Mutated(target, compile(tree, str(target.path), "exec", dont_inherit=True)))
    tests = [f"tests/unit/{name}" for name in target.tests]
    options = ["-x", "-q", "--no-header", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    limits = _Limits(limit)
    code = int(pytest.main([*options, *(["-k", target.select] if target.select else []), *tests], [limits]))
    print(limits.longest)
    sys.stdout.flush()
    return code


class _Limits:
    """A plugin of pytest that ends the process where a test computes for too long.

    Args:
        seconds: How long a test may compute.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.longest = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._begin = time.process_time()
        soft = math.ceil(self._begin + self._seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))

    def pytest_runtest_logfinish(self) -> None:
        self.longest = max(self.longest, time.process_time() - self._begin)


class _Mutated(importlib.abc.MetaPathFinder):
    """Finds the mutant where a module is imported."""

    def __init__(self, target: Target, code: CodeType) -> None:
        self._target, self._code = target, code

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._target.module:
            return None
        loader = _Loader(fullname, str(self._target.path), self._code)
        return importlib.util.spec_from_file_location(fullname, self._target.path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, code: CodeType) -> None:
        super().__init__(fullname, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code
