"""Run tests against mutants: they are collected once, and each mutant is planted in a fork of that process.

A mutant of a function's code takes the place of that code, wherever the function has been imported already. One of a
class or of the module is there before the module is imported, and its fork collects the tests as well.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mutation.targets import ROOT

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Sequence
    from types import CodeType

    from mutation.mutants import Mutant
    from mutation.targets import Target

_PATIENCE = 4
"""How many times as long as the longest test without a mutant any test may compute. A mutant that hangs is found."""
_LEAST_SECONDS = 3.0
_WAITING_SECONDS = 1800
"""For how long tests may run at all: those of a mutant whose ranks wait for each other, or on a busy machine."""
_MEMORY_BYTES = 8 << 30
_PASSED, _FAILED, _NOT_PLANTED = 0, 1, 77


def import_what_tests_need() -> None:
    """Import what takes long, so that child processes have it."""
    import hypothesis
    import numpy  # noqa: F401, ICN001
    import torch.distributed
    import torch.optim  # noqa: F401

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # which reads the metadata of each installed distribution
    # The same examples for each mutant. Nobody reads the smallest one. Checks of its own health fail on a busy machine.
    hypothesis.settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutation")
    gc.collect()
    gc.freeze()  # pytest collects all garbage, several times


def survivors_of(target: Target, mutants: Sequence[Mutant], tree: ast.Module, num_workers: int) -> list[int]:
    """Return the positions of the mutants with which all of the target's tests pass.

    Args:
        target: The module and its tests.
        mutants: What to plant; each child process plants one.
        tree: The module's syntax tree, which the mutants change.
        num_workers: How many child processes run at a time.

    Raises:
        RuntimeError: If the tests fail without a mutant.
    """
    runs = _Runs(target, mutants, tree, num_workers)
    answer = os.memfd_create("answer")

    def collect_and_run() -> int:
        code = _run_pytest(target, [runs])
        os.write(answer, json.dumps(runs.codes).encode())
        return code

    log = os.memfd_create("pytest")
    _, status = os.waitpid(_fork(collect_and_run, log), 0)
    content = os.pread(answer, 1 << 24, 0)
    if status or not content:
        msg = f"The tests of {target.module} fail without a mutant:\n{os.pread(log, 1 << 16, 0).decode()}"
        raise RuntimeError(msg)
    codes = {int(position): code for position, code in json.loads(content).items()}
    return sorted(position for position, code in codes.items() if code == _PASSED)


class _Runs:
    """A plugin of pytest that runs the collected tests once for each mutant, in forks.

    Args:
        target: The module and its tests.
        mutants: What to plant.
        tree: The module's syntax tree.
        num_workers: How many forks run at a time.

    Attributes:
        codes: By the mutant's position, the exit code of its fork.
    """

    def __init__(self, target: Target, mutants: Sequence[Mutant], tree: ast.Module, num_workers: int) -> None:
        self._target, self._mutants, self._tree, self._num_workers = target, mutants, tree, num_workers
        self.codes: dict[int, int] = {}
        self._screen = os.dup(sys.stdout.fileno())  # while what pytest prints goes elsewhere

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.collect()
        gc.freeze()
        limits = _Limits(math.inf)
        before = os.memfd_create("seconds")

        def without_mutant() -> int:
            code = _run_items(session.items, limits)
            os.write(before, json.dumps(limits.seconds_of).encode())
            return code

        _, status = os.waitpid(_fork(without_mutant), 0)
        if status or session.testsfailed:
            session.testsfailed += 1
            return True
        seconds_of = json.loads(os.pread(before, 1 << 24, 0))
        limits = _Limits(max(max(seconds_of.values()) * _PATIENCE, _LEAST_SECONDS))
        items = sorted(session.items, key=lambda item: seconds_of[item.nodeid])
        again = self._run(range(len(self._mutants)), items, lambda *given: self._in_place(*given, limits))
        self._run(again, items, lambda mutant, *_: self._imported(mutant, limits))
        return True

    def _run(
        self,
        positions: Sequence[int],
        items: list[pytest.Item],
        function: Callable[[Mutant, list[pytest.Item], int], int],
    ) -> list[int]:
        """Call a function on mutants in forks; return the positions of those that it can't plant.

        The test that found a mutant runs first for the next ones.
        """
        todo, running, again = list(positions)[::-1], dict[int, tuple[int, int]](), list[int]()
        while todo or running:
            while todo and len(running) < self._num_workers:
                position, failed = todo.pop(), os.memfd_create("failed")
                pid = _fork(functools.partial(function, self._mutants[position], items, failed))
                running[pid] = position, failed
            pid, status = os.wait()
            (position, failed), code = running.pop(pid), os.waitstatus_to_exitcode(status)
            name = os.pread(failed, 1 << 16, 0).decode()
            os.close(failed)
            items.sort(key=lambda item: item.nodeid != name)
            if code == _NOT_PLANTED:
                again.append(position)
            else:
                self.codes[position] = code
                if code == _PASSED:
                    os.write(self._screen, f"  survived: {self._mutants[position].key}\n".encode())
        return again

    def _in_place(self, mutant: Mutant, items: list[pytest.Item], failed: int, limits: _Limits) -> int:
        """Plant a mutant in the imported module, and run the collected tests."""
        module = sys.modules.get(self._target.module)
        if module is None:
            return _NOT_PLANTED
        function = _function_of(module, mutant.function)
        if function is None:
            return _NOT_PLANTED
        twin = types.ModuleType(module.__name__)
        twin.__file__ = module.__file__
        mutant.plant()
        try:
            exec(compile(self._tree, str(self._target.path), "exec", dont_inherit=True), vars(twin))
        except Exception:  # noqa: BLE001 - it can't be imported: the tests would fail
            return _FAILED
        other = _function_of(twin, mutant.function)
        if other is None or len(other.__code__.co_freevars) != len(function.__code__.co_freevars):
            return _NOT_PLANTED
        function.__code__ = other.__code__
        function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__
        return _run_items(items, limits, failed)

    def _imported(self, mutant: Mutant, limits: _Limits) -> int:
        """Plant a mutant before the module is imported, and collect the tests once more."""
        mutant.plant()
        code = compile(self._tree, str(self._target.path), "exec", dont_inherit=True)
        tests = str(ROOT / "tests")
        for name, module in list(sys.modules.items()):  # the tests' modules have imported names of the module
            if name.startswith("booster_") or str(getattr(module, "__file__", "")).startswith(tests):
                del sys.modules[name]
        sys.meta_path.insert(0, _Mutated(self._target, code))
        limits.begin()
        return _run_pytest(self._target, [limits])


def _function_of(module: types.ModuleType, qualified: str) -> Any:
    """Return a function or method of a module without what wraps it; ``None`` where the name is no function's."""
    found: Any = module
    for name in qualified.split("."):
        found = inspect.getattr_static(found, name, None)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = found.func
    elif isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else None
    is_own = isinstance(found, types.FunctionType) and found.__code__.co_filename == module.__file__
    return found if is_own else None


def _fork(function: Callable[[], int], log: int | None = None) -> int:
    """Call a function in a fork, which ends with what it returns; return the fork's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = _FAILED
    try:
        if log is not None:
            os.dup2(log, 1)
            os.dup2(log, 2)
        code = function()
    except BaseException:  # noqa: BLE001 - a fork has no other way out
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_pytest(target: Target, plugins: list[Any]) -> int:
    tests = [f"tests/{name}" for name in target.tests]
    # Without capture, which forks would share.
    options = ["-x", "-q", "--no-header", "--tb=short", "--assert=plain", "-p", "no:cacheprovider", "-s"]
    options += ["-p", "pytest_timeout"]  # of which pytest.ini has an option
    return int(pytest.main([*options, *(["-k", target.select] if target.select else []), *tests], plugins))


def _run_items(items: Sequence[pytest.Item], limits: _Limits, failed: int | None = None) -> int:
    """Run collected tests up to the first that fails, whose name goes to the file descriptor ``failed``."""
    limits.begin()
    for item, following in zip(items, [*items[1:], None], strict=True):
        limits.pytest_runtest_logstart()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        limits.pytest_runtest_logfinish(item.nodeid)
        if item.session.testsfailed:
            if failed is not None:
                os.write(failed, item.nodeid.encode())
            return _FAILED
    return _PASSED


class _Limits:
    """A plugin of pytest that ends the process where a test computes for too long.

    Args:
        seconds: How long a test may compute.

    Attributes:
        seconds_of: How long each test computed, by its name.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begin = 0.0
        self.seconds_of: dict[str, float] = {}

    def begin(self) -> None:
        """Set the limits of the whole process."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        present = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (present + _MEMORY_BYTES,) * 2)
        signal.alarm(_WAITING_SECONDS)

    def pytest_runtest_logstart(self) -> None:
        self._begin = time.process_time()
        if math.isfinite(self._seconds):
            soft = math.ceil(self._begin + self._seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds_of[nodeid] = time.process_time() - self._begin


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
