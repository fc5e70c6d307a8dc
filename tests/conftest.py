"""Shared fixtures: fail tests that leak state of the process."""

import contextlib
import functools
import gc
import os
import sys
import threading
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import pytest
import torch
from forked_scripts import forked_scripts

from booster_core.ranks import run_in_turns
from booster_testing import close_ranks, rank_pool

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("tests", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("tests")


_SLOW_SECONDS = 3600
"""Time limit of a slow test; pytest.ini has that of the others."""
_OF_RANKS = ("on_ranks", "open_ranks", "on_devices", "same_loop", "Conformance", "scripts.run")
"""What is in files whose tests run on ranks."""
_STARTED_FIRST = {"ranks_with_isolated_libraries": "isolated libraries", "scripts.run": "scripts"}
"""What is in files whose tests need a process that imports for seconds. One test process runs all of them."""


def pytest_configure():
    gc.disable()  # until all is imported and collected, of which nothing is garbage
    run_in_turns()  # also the scripts and commands that tests start
    # Many processes share the processors, and threads that wait for each other would spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # torch has read the variable before


def pytest_itemcollected(item):
    """Mark the tests that take long while the default run has others like them."""
    if not _long_tests().isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
        item.add_marker("long")


@functools.cache
def _long_tests():
    file = Path(__file__).with_name("evidence") / "long.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []  # no sdist has it
    return frozenset(line.partition(" ")[2] for line in lines)


@pytest.hookimpl(trylast=True)  # after markers and names have selected the tests
def pytest_collection_modifyitems(items):
    """Give slow tests their time limit; move files with many cases to the front, and those without ranks to the end.

    A parallel run starts files in this order: what takes long and started last would run alone in the end.
    """
    cases = Counter(item.path for item in items)
    items.sort(key=lambda item: (_group_of(item.path) is None, not _has_ranks(item.path), -cases[item.path]))
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SLOW_SECONDS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deal out files, and groups of files that share a process, where the run asks for files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return _group_of(config.rootpath / file) or file

    return Scheduling(config, log)


@pytest.fixture
def transformers_leaves_nothing(monkeypatch, tmp_path):
    """Keep transformers from leaving its loading threads, and torch from setting a variable for good."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@functools.cache
def _has_ranks(path):
    text = path.read_text(encoding="utf-8")
    return any(word in text for word in _OF_RANKS)


@functools.cache
def _group_of(path):
    text = path.read_text(encoding="utf-8")
    return next((group for word, group in _STARTED_FIRST.items() if word in text), None)


def pytest_collection_finish():
    _settle_garbage()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures of the file
def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:
        _settle_garbage()


def _settle_garbage():
    """Exclude imported modules and collected tests from collections of garbage, and from searches among all objects.

    There are hundreds of thousands, at which a lazy model that gets its values would look each time.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    close_ranks()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaks environment variables, threads, child processes or a process group."""
    environment, threads, children = _environment(), set(threading.enumerate()), _children()
    yield
    left = []
    now = _environment()
    changed = sorted(name for name in environment.keys() | now.keys() if environment.get(name) != now.get(name))
    if changed:
        left.append(f"environment variables {', '.join(changed)}")
        for name in changed:
            if name in environment:
                os.environ[name] = environment[name]
            else:
                del os.environ[name]
    started = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    left += [f"thread {thread.name!r}" for thread in started if not _ends_by_itself(thread)]
    left += [f"child process {pid}" for pid in sorted(_children() - children - set(rank_pool.worker_pids()))]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        left.append("a process group")
        distributed.destroy_process_group()
    if left:
        pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture(scope="session")
def scripts():
    """Run scripts in forks of a process that has imported what they import: `ForkedScripts.run`."""
    with forked_scripts() as running:
        yield running


@pytest.fixture(scope="module")
def simulated_device():
    """Build the simulated accelerator; functions on ranks pass the library to ``simulated_device.load``."""
    from simulated_device import NotBuiltError, build

    try:
        library = build(Path(__file__).parents[1] / "build" / "simulated_device")
    except NotBuiltError as error:
        pytest.skip(str(error))
    close_ranks()  # autograd counts the devices when it first runs, and would find none
    yield library
    close_ranks()  # torch would use the device as the machine's accelerator in later tests


@pytest.fixture(scope="session")
def forks_with_isolated_libraries():
    """Another fork server, that `ranks_with_isolated_libraries` are forked from."""
    forks = forkserver.ForkServer()
    yield forks
    forks._stop()


@pytest.fixture(scope="module")
def ranks_with_isolated_libraries(forks_with_isolated_libraries):
    """Run ranks that have found the isolated libraries, and in which others found them when they were imported."""
    close_ranks()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_forkserver", "ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            own = forks_with_isolated_libraries
            patch.setattr(forkserver, name, own if name == "_forkserver" else getattr(own, name))
        patch.setattr(rank_pool, "imported_first", ["with_isolated_libraries"])
        yield
        close_ranks()  # these workers have imported what other tests must not see


_NAMELESS_POOL = "ThreadPoolExecutor-"
"""Names of threads of unnamed pools. Ours have names."""
_GRACE_SECONDS = 10.0


def _ends_by_itself(thread):
    """Return whether a thread belongs to a library's pool that was shut down, and ends.

    transformers shuts down its pool of readers without waiting for them. Threads of other pools never end.
    """
    if thread.name.startswith(_NAMELESS_POOL):
        thread.join(_GRACE_SECONDS)
    return not thread.is_alive()


_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TORCH_FR_BUFFER_SIZE"}
"""Variables that pytest sets, torch when an optimizer is first used, and a launch for process groups to come."""


def _environment():
    return {name: value for name, value in os.environ.items() if name not in _OTHERS}


def _children():
    """Return the process ids of this process's children (empty if the kernel does not list them)."""
    pids = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread may have ended meanwhile
            pids.update(map(int, file.read_text().split()))
    return pids
