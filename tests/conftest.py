"""What all tests share: GPU tests run where there are GPUs, and no test may leave anything behind in its process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest

from booster_testing import close_ranks
from booster_testing.rank_pool import worker_pids

# The transport of users with GPUs or several hosts. `nox -s direct` tests the other one.
os.environ.setdefault("BOOSTER_TRANSPORT", "torch")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        import torch

        wanted = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < wanted:
            pytest.skip(f"needs {wanted} CUDA devices, and {torch.cuda.device_count()} are here")


def pytest_sessionfinish() -> None:
    close_ranks()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves environment variables, threads, child processes or a process group behind."""
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
    left += [f"child process {pid}" for pid in sorted(_children() - children - set(worker_pids()))]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        left.append("a process group")
        distributed.destroy_process_group()
    if left:
        pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture(scope="module")
def simulated_device():
    """Build the simulated accelerator; functions on ranks pass its library to ``simulated_device.load``."""
    from simulated_device import NotBuiltError, build

    try:
        library = build(Path(__file__).parents[1] / "build" / "simulated_device")
    except NotBuiltError as error:
        pytest.skip(str(error))
    close_ranks()  # autograd counts the devices when it first runs, and would know of none
    yield library
    close_ranks()  # torch would take the device for the machine's accelerator in whatever they ran next


_NAMELESS_POOL = "ThreadPoolExecutor-"
"""How threads of a pool without a name are called. Ours have names."""
_GRACE_SECONDS = 10.0


def _ends_by_itself(thread: threading.Thread) -> bool:
    """Return whether a thread is of a library's pool that was told to end, and does.

    transformers shuts its readers' pool down without waiting for them. One that nobody told to end waits for ever.
    """
    if thread.name.startswith(_NAMELESS_POOL):
        thread.join(_GRACE_SECONDS)
    return not thread.is_alive()


_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that pytest and torch set themselves, the latter when an optimizer is first used."""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OTHERS}


def _children() -> set[int]:
    """Return the process ids of this process' children (none where the kernel does not tell)."""
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread may have ended meanwhile
            pids.update(map(int, file.read_text().split()))
    return pids
