"""Run a target's tests against mutants: in a fork for each, which has it before the module is imported."""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import pytest

_PATIENCE = 4
"""How many times as long as without a mutant the tests may compute. A mutant that hangs is found."""
_LEAST_SECONDS = 5.0
_WAITING_SECONDS = 1800
"""For how long tests may run at all: those of a mutant whose ranks wait for each other, or on a busy machine."""
_MEMORY_BYTES = 8 << 30


def import_what_tests_need():
    """Import what takes long, and nothing of ours, so that forks have it."""
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


def survivors_of(target, mutants, tree, num_workers):
    """Return the positions of the mutants with which all of the target's tests pass.

    Args:
        target: The module and its tests.
        mutants: What to plant; each fork plants one.
        tree: The module's syntax tree, which the mutants change.
        num_workers: How many forks run at a time.

    Raises:
        RuntimeError: If the tests fail without a mutant.
    """
    log = os.memfd_create("pytest")
    _, status, usage = os.wait4(_fork(lambda: _run_tests(target, _WAITING_SECONDS), log), 0)
    if status:
        msg = f"The tests of {target.module} fail without a mutant:\n{os.pread(log, 1 << 16, 0).decode()}"
        raise RuntimeError(msg)
    seconds = math.ceil((usage.ru_utime + usage.ru_stime) * _PATIENCE + _LEAST_SECONDS)

    def plant_and_run(mutant):
        mutant.plant()
        sys.meta_path.insert(0, _Mutated(target, compile(tree, str(target.path), "exec", dont_inherit=True)))
        return _run_tests(target, seconds)

    todo, running, survivors = list(range(len(mutants))), dict[int, int](), list[int]()
    while todo or running:
        while todo and len(running) < num_workers:
            position = todo.pop()
            running[_fork(lambda mutant=mutants[position]: plant_and_run(mutant), log)] = position
        pid, status = os.wait()
        position = running.pop(pid)
        if status == 0:
            survivors.append(position)
            print(f"  survived: {mutants[position].key}", flush=True)
    return sorted(survivors)


def _fork(function, log):
    """Call a function in a fork that prints into a file, and ends with what it returns; return the fork's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = function()
    except BaseException:  # noqa: BLE001 - a fork has no other way out
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_tests(target, seconds):
    """Run the target's tests up to the first that fails; the process ends if they compute for longer."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    present = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    signal.alarm(_WAITING_SECONDS)
    # Without capture, which forks would share.
    options = ["-x", "-q", "--no-header", "--tb=short", "--assert=plain", "-p", "no:cacheprovider", "-s"]
    options += ["-p", "pytest_timeout"]  # of which pytest.ini has an option
    options += ["-k", target.select] if target.select else []
    return int(pytest.main([*options, *(f"tests/{name}" for name in target.tests)]))


class _Mutated(importlib.abc.MetaPathFinder):
    """Finds the mutant where a module is imported."""

    def __init__(self, target, code):
        self._target, self._code = target, code

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._target.module:
            return None
        loader = _Loader(fullname, str(self._target.path), self._code)
        return importlib.util.spec_from_file_location(fullname, self._target.path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname, path, code):
        super().__init__(fullname, path)
        self._code = code

    def get_code(self, fullname):
        return self._code
