"""The worker process that runs one rank of each call of `booster_testing.ranks`.

Its parent sends, over a pipe, the function and the file to call. After each call, the worker restores the process state
that the call may have changed. It ends when its parent ends, also if the parent is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import random
import reprlib
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection


CLOSE = "close"
"""In the place of a call, closes the open group."""
_SECONDS_TO_END = 2.0
"""How long threads that a call began may take to end after it."""
_MOST_CALLS = 100
"""After as many calls a worker is replaced, whose collections of garbage look only at what is new."""
_MOST_GLOO_THREADS = 100
"""With more, too: DDP and DeviceMesh keep groups alive after they are destroyed."""

_num_calls = 0
_open_group_name = ""
"""Of the group that calls share."""
_before_group: _State | None = None
"""From before that group was opened."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's part of a call of `run_on_ranks`.

    Args:
        module: Name of the function's module in the parent.
        file: The file of that module.
        qualname: The function's name within the module.
        arguments: Pickled ``(args, kwargs, prepare)``.
        modules: Names and files of the modules with the classes and functions among the arguments.
        rank: The rank of the worker.
        world_size: Number of ranks.
        store_file: File of the store for this call's process group.
        group: Name of an open group, which calls of that name share; none for a group of this call alone.
        backend: As for ``init_process_group``.
        group_timeout_seconds: Time limit of the group's collectives.
        environment: The parent's environment variables.
        path: The parent's ``sys.path``.
        warning_filters: The parent's warning filters: action, message, category, module, line number.
    """

    module: str
    file: str
    qualname: str
    arguments: bytes
    modules: tuple[tuple[str, str], ...]
    rank: int
    world_size: int
    store_file: str
    group: str
    backend: str
    group_timeout_seconds: float
    environment: dict[str, str]
    path: list[str]
    warning_filters: list[tuple[str, str, str, str, int]]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception to be sent to the parent.

    Args:
        kinds: Qualified names of its class and all base classes.
        summary: The last line of its traceback.
        text: Its traceback.
        pickled: The exception itself, if it can be pickled and unpickled.
        at_seconds: When it was raised, on the machine's monotonic clock.
    """

    kinds: tuple[str, ...]
    summary: str
    text: str
    pickled: bytes | None
    at_seconds: float


def serve(connection: Connection, stack_file: str) -> None:
    """Serve calls until the parent sends the end, or exits.

    Args:
        connection: This worker's end of the pipe to its parent.
        stack_file: File that gets the stacks of all threads on ``SIGUSR1``.
    """
    from booster_core.ranks import run_in_turns

    # As in a process that a shell has started: what a test starts, such as a loader's workers, is no fork server's.
    multiprocessing.set_start_method(None, force=True)
    os.setpgid(0, 0)  # Ctrl-C goes to the test process only; killpg reaches the worker's children, and no other worker
    run_in_turns()
    threading.Thread(target=_die_with_parent, name="parent watch", daemon=True).start()
    with Path(stack_file).open("w") as stacks:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        _settle_garbage()
        connection.send_bytes(pickle.dumps(("ready", None)))
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own parent
            except EOFError:
                break
            if call is None:
                break
            if call == CLOSE:
                _close_group()
                leaks = [] if _before_group is None else _before_group.restore()
                connection.send_bytes(pickle.dumps(("closed", leaks)))
            else:
                _serve(connection, call)


def _die_with_parent() -> None:
    """End this process and its children as soon as the parent ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started as a process"
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _serve(connection: Connection, call: Call) -> None:
    """Run one call, report its outcome, and clean up when all ranks have reported."""
    global _before_group, _num_calls  # noqa: PLW0603 - a worker serves one call after another
    _num_calls += 1
    before = _State()
    succeeded = False
    answer: tuple[str, Any]
    try:
        sys.path[:] = call.path
        function = _load(call.module, call.file, call.qualname)
        for name, file in call.modules:
            _load_module(name, file)
        args, kwargs, prepare = pickle.loads(call.arguments)  # noqa: S301 - from our own parent
        connection.send_bytes(pickle.dumps(("loaded", None)))
        if connection.recv_bytes() != b"open":
            msg = "another rank could not load the function"
            raise RuntimeError(msg)
        if not call.group or call.group != _open_group_name:
            if prepare is not None:
                prepare()
            _open_group(call)
            _before_group = before
        _seed()
        with _as_in_parent(call):
            value = function(*args, **kwargs)
        del args, kwargs
        answer = ("returned", _pickle_result(value))
        del value
        succeeded = True
    except BaseException as error:  # noqa: BLE001 - also pytest's outcomes, which are not Exceptions
        answer = ("raised", _pack(error))
        traceback.clear_frames(error.__traceback__)
        del error
    if not succeeded:
        _close_group()  # so that ranks waiting for this one in a collective fail at once
    connection.send_bytes(pickle.dumps(answer))
    # Closing connections earlier would disturb ranks that are still running.
    if connection.recv_bytes() != b"finish":
        return
    leaks = ["a process group that it initialized itself"] if _has_foreign_group() else []
    if not call.group:
        _close_group()
    threads = before.restore(waits=not call.group)
    if not call.group:  # what works for an open group ends with it
        leaks += threads
    is_worn = (_num_calls >= _MOST_CALLS and not call.group) or _num_gloo_threads() > _MOST_GLOO_THREADS
    connection.send_bytes(pickle.dumps(("clean", (leaks, is_worn))))


def _load(module: str, file: str, qualname: str) -> Callable[..., Any]:
    """Return the function, from the same file under the same module name as in the parent."""
    function: Callable[..., Any] = attrgetter(qualname)(_load_module(module, file))
    return function


def _load_module(module: str, file: str) -> Any:
    """Return the module of a name, from the same file as in the parent."""
    if module == "__main__":
        module = "__mp_main__"  # as multiprocessing does, so that the script's main block does not run again
    loaded = sys.modules.get(module)
    if loaded is None or not _is_file_of(loaded, file):
        spec = None
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and Path(spec.origin) == Path(file):
            loaded = importlib.import_module(module)
        else:
            spec = importlib.util.spec_from_file_location(module, file)
            if spec is None or spec.loader is None:
                msg = f"the file {file} of module {module} cannot be loaded"
                raise ImportError(msg)
            loaded = importlib.util.module_from_spec(spec)
            _add_parents(module)
            sys.modules[module] = loaded  # before its code runs, so that its classes can be pickled
            try:
                spec.loader.exec_module(loaded)
            except BaseException:
                del sys.modules[module]
                raise
        if module == "__mp_main__":
            sys.modules["__main__"] = loaded
        _settle_garbage()
    return loaded


def _add_parents(module: str) -> None:
    """Add empty packages where those above a module can't be imported: unpickling imports them by name."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        with contextlib.suppress(ImportError):
            importlib.import_module(parent)
        sys.modules.setdefault(parent, ModuleType(parent))


def _settle_garbage() -> None:
    """Exclude what is there from later garbage collections: mostly imported modules, whose memory forks share."""
    gc.collect()
    gc.freeze()


def _is_file_of(module: Any, file: str) -> bool:
    return Path(getattr(module, "__file__", None) or "") == Path(file)


def _open_group(call: Call) -> None:
    """Open the default process group by the same code as `booster_core.launch`."""
    global _open_group_name  # noqa: PLW0603 - a worker has one default group at a time
    from torch.distributed import FileStore  # type: ignore[attr-defined] # torch does not list it as public

    from booster_core.ranks import open_world
    from booster_runtime.watch import start_monitor

    if "cuda" in call.backend:
        import torch

        torch.cuda.set_device(call.rank % torch.cuda.device_count())
    world = open_world(
        FileStore(call.store_file, call.world_size),
        rank=call.rank,
        world_size=call.world_size,
        local_rank=call.rank,
        backend=call.backend,
        timeout_seconds=call.group_timeout_seconds,
        generation=0,  # the store is new, and workers may have served different numbers of calls
    )
    hosts = ["localhost"] * call.world_size
    world.monitor = start_monitor(world, hosts, "localhost", may_end_process=False)
    _open_group_name = call.group


def _has_foreign_group() -> bool:
    """Return whether the default group is another one than that opened for the call."""
    import torch.distributed as dist

    from booster_core.ranks import opened_world

    return dist.is_initialized() and not opened_world().is_current


def _close_group() -> None:
    global _open_group_name  # noqa: PLW0603 - a worker has one default group at a time
    from booster_core.ranks import close_world

    _open_group_name = ""
    with contextlib.suppress(RuntimeError):  # other ranks may have closed their connections already
        close_world()


@contextlib.contextmanager
def _as_in_parent(call: Call) -> Iterator[None]:
    """Apply the parent's environment variables and warning filters; `_State` restores the variables."""
    os.environ.clear()
    os.environ.update(call.environment)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(call.warning_filters):
            home, _, name = category.rpartition(".")
            kind = getattr(sys.modules.get(home), name, None)
            if isinstance(kind, type):
                warnings.filterwarnings(action, message, kind, module, line)  # type: ignore[arg-type]
        yield


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - a test's code may use the global generator
    torch.manual_seed(0)


class _HostPickler(pickle.Pickler):
    """Pickles tensors of accelerators as tensors of the CPU: the test's process may know no such device."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a tensor again, as `pickle.Pickler.reducer_override`."""
        import torch

        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            on_host: Any = value.detach().cpu()
            return on_host.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickle_result(value: Any) -> bytes:
    try:
        file = io.BytesIO()
        _HostPickler(file).dump(value)
        return file.getvalue()
    except Exception as error:
        msg = f"the function's result, a {type(value).__name__}, cannot be sent to the test: {error}"
        raise TypeError(msg) from error


def _pack(error: BaseException) -> Failure:
    """Convert an exception to a message for the parent."""
    pickled = None
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - some exceptions can be pickled but not unpickled
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # begins with the function that was called
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError):
        text += _innermost_locals(error)
    return Failure(
        kinds=tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__),
        summary="".join(traceback.format_exception_only(type(error), error)).strip(),
        text=text,
        pickled=pickled,
        at_seconds=time.monotonic(),
    )


def _innermost_locals(error: BaseException) -> str:
    """Return the local variables at a failed assert: pytest's assertion rewriting works in its own process only."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    shorten = reprlib.Repr()
    shorten.maxother = shorten.maxstring = 200
    lines = []
    for name, value in trace.tb_frame.f_locals.items():
        try:
            lines.append(f"    {name} = {shorten.repr(value)}\n")
        except Exception as problem:  # noqa: BLE001 - a failing __repr__ must not hide the error
            lines.append(f"    {name} = <{type(value).__name__}, whose repr raised {problem!r}>\n")
    return "with\n" + "".join(lines) if lines else ""


class _State:
    """Process state from before a call, to be restored after it."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._path = list(sys.path)
        self._folder = Path.cwd()
        self._threads = {thread.ident for thread in threading.enumerate()}
        self._excepthook = sys.excepthook

    def restore(self, *, waits: bool = True) -> list[str]:
        """Restore the state and return the call's leaks: threads that still run, also after a wait."""
        import torch

        os.environ.clear()
        os.environ.update(self._environment)
        sys.path[:] = self._path
        sys.excepthook = self._excepthook
        os.chdir(self._folder)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        if torch.are_deterministic_algorithms_enabled():  # else the call only imports torch's compiler
            torch.use_deterministic_algorithms(False)  # noqa: FBT003 - torch's only form
        torch.autograd.set_detect_anomaly(False)
        _settle_garbage()
        began = [each for each in threading.enumerate() if each.ident not in self._threads and not each.daemon]
        until = time.monotonic() + (_SECONDS_TO_END if waits else 0)
        for thread in began:  # those of an executor end by themselves once nobody has it
            thread.join(max(until - time.monotonic(), 0))
        return [f"thread {thread.name!r}" for thread in began if thread.is_alive()]


def _num_gloo_threads() -> int:
    """Return the number of gloo threads; torch's own caches keep some groups alive."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            names.append(task.read_text())
    return sum("gloo" in name for name in names)
