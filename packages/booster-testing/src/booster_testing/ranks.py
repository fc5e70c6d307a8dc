"""Run a test's function on several ranks, in worker processes that are reused between tests.

Starting a process and importing torch takes longer than most tests, so workers are started once, in parallel, when
they are first needed, and each call only creates a new process group among them (over a file, without ports). Errors
name their rank: exceptions with tracebacks, hangs with stacks, and process deaths with exit codes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import re
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from booster_testing.rank_pool import (
    CLEAN_SECONDS,
    START_SECONDS,
    RankDiedError,
    RankError,
    RankTimeoutError,
    Worker,
    the_pool,
)
from booster_testing.rank_worker import Call, Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

MAX_WORLD_SIZE = 8
"""With more ranks, tests depend on the machine's scheduler."""

_GRACE_SECONDS = 5.0
"""What the other ranks get after the first failure, not counting the time in which they wait for a processor."""
_POLL_SECONDS = 0.2
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote end|timed out waiting|\[.*gloo.*\].*(closed|reset)|"
    r"another rank could not load",
    re.IGNORECASE,
)
_numbers = itertools.count()


@dataclass
class _Outcome:
    """The outcome of a call on one rank: exactly one field is set."""

    value: bytes | None = None
    failure: Failure | None = None
    death: str | None = None
    stack: str | None = None


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    group_timeout_seconds: float = 30.0,
    backend: str = "gloo",
    prepare: Callable[[], None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a fresh process group and return the results by rank.

    Args:
        fn: A function at a module's top level. The default process group is initialized, as by `launch`.
        world_size: Number of ranks, 1 to 8.
        *args: Picklable arguments; the same on every rank.
        timeout_seconds: Time limit of the call, starting when all ranks have loaded the function. What a rank waits
            for a processor, on a loaded machine, does not count.
        group_timeout_seconds: Time limit of the group's collectives and rendezvous.
        backend: As for ``init_process_group``.
        prepare: Picklable; called on every rank before its process group is opened, for example to register the
            backend of a device that extends torch from outside.
        **kwargs: Picklable keyword arguments.

    Returns:
        The results of ranks ``0`` to ``world_size - 1``.

    Raises:
        RankError: If ``fn`` raised on some rank, or left a thread or a process group behind. The first failing rank's
            exception is the cause.
        RankTimeoutError: If ``fn`` did not end in time; its workers are killed.
        RankDiedError: If a worker ended.

    Collective: none; called in the test's process.
    """
    __tracebackhide__ = True
    ranks = Ranks(world_size, group_timeout_seconds=group_timeout_seconds, backend=backend, prepare=prepare, name="")
    return ranks.call(fn, *args, timeout_seconds=timeout_seconds, **kwargs)


def expect_on_ranks(
    error_type: type[BaseException] | tuple[type[BaseException], ...],
    match: str,
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    group_timeout_seconds: float = 30.0,
    backend: str = "gloo",
    prepare: Callable[[], None] | None = None,
    **kwargs: Any,
) -> list[BaseException | None]:
    """Assert that ``fn`` raises ``error_type`` on every rank, with a message that matches ``match``.

    Args:
        error_type: The expected class, or several.
        match: Regular expression, searched in the text of each rank's exception.
        fn: As for `run_on_ranks`, with the arguments that follow.
        world_size: Number of ranks.
        *args: Arguments of ``fn``.
        timeout_seconds: Time limit of the call.
        group_timeout_seconds: Time limit of the group's collectives and rendezvous.
        backend: As for ``init_process_group``.
        prepare: Called on every rank before its process group is opened.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        The exceptions by rank; ``None`` for one that could not be pickled.

    Raises:
        AssertionError: If a rank raised nothing, another class, or another message.
        RankTimeoutError: As for `run_on_ranks`.
        RankDiedError: As for `run_on_ranks`.

    Collective: none; called in the test's process.
    """
    __tracebackhide__ = True
    ranks = Ranks(world_size, group_timeout_seconds=group_timeout_seconds, backend=backend, prepare=prepare, name="")
    return ranks.expect(error_type, match, fn, *args, timeout_seconds=timeout_seconds, **kwargs)


def _check_left(what: str, leaks: dict[int, list[str]]) -> None:
    for rank, left in leaks.items():
        if left:
            msg = f"{what} left behind on rank {rank}: {', '.join(left)}. Close what it opens."
            raise RankError(msg, rank, {})


class Ranks:
    """The ranks of a process group that is opened by the first call, and again after a call that failed.

    The workers have one group at a time: a call on other ranks closes it, and the next call here opens it again. Each
    call starts from the same random state. A context manager, which closes the group.

    Args:
        world_size: Number of ranks, 1 to 8.
        group_timeout_seconds: Time limit of the group's collectives and rendezvous.
        backend: As for ``init_process_group``.
        prepare: Called on every rank before the group is opened.
        name: What no other group is called; each call of a group without a name has one of its own.
    """

    def __init__(
        self,
        world_size: int,
        *,
        group_timeout_seconds: float = 30.0,
        backend: str = "gloo",
        prepare: Callable[[], None] | None = None,
        name: str | None = None,
    ) -> None:
        self._world_size, self._timeout_seconds = world_size, group_timeout_seconds
        self._backend, self._prepare = backend, prepare
        self._name = f"group {next(_numbers)}" if name is None else name

    def call(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results by rank; see `run_on_ranks`."""
        __tracebackhide__ = True
        call = self._make_call(fn, args, kwargs)
        outcomes, leaks = _execute(call, timeout_seconds, _GRACE_SECONDS)
        if any(outcome.value is None for outcome in outcomes):
            _raise(call.qualname, outcomes, timeout_seconds)
        _check_left(f"`{call.qualname}`", leaks)
        return [pickle.loads(outcome.value) for outcome in outcomes if outcome.value is not None]  # noqa: S301

    def expect(
        self,
        error_type: type[BaseException] | tuple[type[BaseException], ...],
        match: str,
        fn: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 60.0,
        **kwargs: Any,
    ) -> list[BaseException | None]:
        """Assert that ``fn`` raises ``error_type`` on every rank; see `expect_on_ranks`."""
        __tracebackhide__ = True
        call = self._make_call(fn, args, kwargs)
        outcomes, _ = _execute(call, timeout_seconds, timeout_seconds)
        if any(outcome.value is None and outcome.failure is None for outcome in outcomes):
            _raise(call.qualname, outcomes, timeout_seconds)
        kinds = error_type if isinstance(error_type, tuple) else (error_type,)
        expected = " or ".join(kind.__name__ for kind in kinds)
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
        complaints = []
        for rank, outcome in enumerate(outcomes):
            failure = outcome.failure
            if failure is None:
                complaints.append(f"rank {rank} raised nothing")
            elif not names.intersection(failure.kinds):
                complaints.append(f"rank {rank} raised something else:\n{failure.text}")
            elif not re.search(match, failure.summary):
                complaints.append(f"rank {rank}'s message does not match {match!r}:\n{failure.text}")
        if complaints:
            msg = f"`{call.qualname}` should raise {expected} on every rank.\n" + "\n".join(complaints)
            raise AssertionError(msg)
        return [_exception(outcome.failure) for outcome in outcomes if outcome.failure is not None]

    def close(self) -> None:
        """Close the group, if it is open.

        Raises:
            RankError: If the calls have left a thread behind.
        """
        pool = the_pool()
        if pool.open_group is not None and pool.open_group[0] == self._name:
            _check_left("The calls", pool.close_group())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if not 1 <= self._world_size <= MAX_WORLD_SIZE:
            msg = f"`world_size={self._world_size}` is not between 1 and {MAX_WORLD_SIZE}."
            raise ValueError(msg)
        module = sys.modules.get(getattr(fn, "__module__", ""))
        file = getattr(module, "__file__", None)
        qualname = getattr(fn, "__qualname__", "")
        if file is None or "<" in qualname or not qualname:
            msg = (
                f"{fn!r} cannot be called on other processes: pass a function defined at the top level of a module's "
                "file."
            )
            raise TypeError(msg)
        arguments, modules = _pickle((args, kwargs, self._prepare))
        return Call(
            module=fn.__module__,
            file=file,
            qualname=qualname,
            arguments=arguments,
            modules=modules,
            rank=0,
            world_size=self._world_size,
            store_file="",
            group=self._name,
            backend=self._backend,
            group_timeout_seconds=self._timeout_seconds,
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            path=list(sys.path),
            warning_filters=[_portable(*entry) for entry in warnings.filters],
        )


open_ranks = Ranks


class _Pickler(pickle.Pickler):
    """Notes the files of the classes and functions that it pickles by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            file = getattr(sys.modules.get(obj.__module__), "__file__", None)
            if file is not None:
                self.modules[obj.__module__] = file
        return NotImplemented


def _pickle(value: Any) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return a pickled value, and the modules that it takes to unpickle it, with their files."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), tuple(pickler.modules.items())


def _portable(action: str, message: Any, category: Any, module: Any, line: int) -> tuple[str, str, str, str, int]:
    """Return a warning filter as strings; its patterns may be compiled, strings, or absent."""
    return (
        action,
        getattr(message, "pattern", message) or "",
        f"{category.__module__}.{category.__qualname__}",
        getattr(module, "pattern", module) or "",
        line,
    )


def _execute(call: Call, timeout_seconds: float, grace_seconds: float) -> tuple[list[_Outcome], dict[int, list[str]]]:
    """Run a call on its ranks; return the outcomes, and the leaks of each rank."""
    pool = the_pool()
    if pool.open_group is not None and pool.open_group[0] != call.group:
        pool.close_group()
    workers = pool.workers(call.world_size)
    if call.group:
        pool.open_group = call.group, call.world_size
    store_file = pool.store_file()
    for rank, worker in enumerate(workers):
        fields = {**vars(call), "rank": rank, "store_file": store_file}
        with contextlib.suppress(OSError):  # its death is detected below
            worker.connection.send_bytes(pickle.dumps(Call(**fields)))
    try:
        outcomes = _collect(workers, timeout_seconds, grace_seconds)
        leaks, needs_restart = _finish(workers, outcomes)
        if needs_restart or any(outcome.value is None for outcome in outcomes):
            pool.close_group()
        for rank in needs_restart:
            pool.retire(rank)
    except BaseException:  # for example KeyboardInterrupt: workers in an unknown state can't be reused
        pool.open_group = None
        for rank in range(len(workers)):
            pool.retire(rank)
        raise
    if not call.group:  # an open group goes on to use its store; the pool's folder goes in the end
        Path(store_file).unlink(missing_ok=True)
    return outcomes, leaks


def _collect(workers: list[Worker], timeout_seconds: float, grace_seconds: float) -> list[_Outcome]:
    """Wait until each rank has returned, raised, died, or run out of time."""
    outcomes: dict[int, _Outcome] = {}
    loading = set(range(len(workers)))
    deadline = time.monotonic() + START_SECONDS
    queued = [worker.queued_seconds() for worker in workers]
    while len(outcomes) < len(workers) and _is_before(deadline, workers, queued):
        running = {workers[rank].connection: rank for rank in range(len(workers)) if rank not in outcomes}
        was_loading, num_bad = bool(loading), _num_bad(outcomes)
        ready = {running[connection] for connection in wait(list(running), _POLL_SECONDS)}  # type: ignore[index]
        # A worker's child processes may keep its pipe open, so also check its exit code.
        ready |= {rank for rank in running.values() if workers[rank].process.exitcode is not None}
        for rank in ready:
            _take_message(rank, workers[rank], loading, outcomes)
        if was_loading and not loading:
            deadline = time.monotonic() + timeout_seconds
            # A rank that opened the group while others still import would use up the group's time limit.
            _send(
                b"stop" if outcomes else b"open",
                [workers[rank] for rank in range(len(workers)) if rank not in outcomes],
            )
        if not num_bad and _num_bad(outcomes):
            deadline = min(deadline, time.monotonic() + grace_seconds)
    for rank, worker in enumerate(workers):
        if rank not in outcomes:
            outcomes[rank] = _Outcome(stack=worker.dump_stack())
    return [outcomes[rank] for rank in range(len(workers))]


def _is_before(deadline: float, workers: list[Worker], queued: list[float]) -> bool:
    """Return whether a call's time limit is ahead. The time in which ranks waited for a processor does not count."""
    late = time.monotonic() - deadline
    return late < 0 or late < max(worker.queued_seconds() - at for worker, at in zip(workers, queued, strict=True))


def _send(word: bytes, workers: list[Worker]) -> None:
    for worker in workers:
        with contextlib.suppress(OSError):  # its death is detected elsewhere
            worker.connection.send_bytes(word)


def _num_bad(outcomes: dict[int, _Outcome]) -> int:
    return sum(outcome.value is None for outcome in outcomes.values())


def _take_message(rank: int, worker: Worker, loading: set[int], outcomes: dict[int, _Outcome]) -> None:
    """Record a worker's message, or its death."""
    try:
        if worker.process.exitcode is not None and not worker.connection.poll(0):
            raise EOFError
        kind, payload = worker.receive()
    except EOFError:
        loading.discard(rank)
        outcomes[rank] = _Outcome(death=worker.describe_death())
        return
    loading.discard(rank)
    if kind == "returned":
        outcomes[rank] = _Outcome(value=payload)
    elif kind == "raised":
        outcomes[rank] = _Outcome(failure=payload)


def _finish(workers: list[Worker], outcomes: list[_Outcome]) -> tuple[dict[int, list[str]], list[int]]:
    """Let the ranks clean up; return the leaks of each, and the ranks whose workers are to be replaced."""
    alive = [rank for rank, outcome in enumerate(outcomes) if outcome.death is None and outcome.stack is None]
    needs_restart = [rank for rank in range(len(workers)) if rank not in alive]
    for rank in needs_restart:
        workers[rank].kill()
    _send(b"finish", [workers[rank] for rank in alive])
    leaks = {}
    deadline = time.monotonic() + CLEAN_SECONDS
    for rank in alive:
        is_worn = False
        try:
            if not workers[rank].connection.poll(max(0.0, deadline - time.monotonic())):
                leaks[rank] = [f"a worker that did not finish its cleanup\n{workers[rank].dump_stack()}"]
            else:
                leaks[rank], is_worn = workers[rank].receive()[1]
        except EOFError:
            leaks[rank] = [f"a worker that {workers[rank].describe_death()} after the call"]
        if leaks[rank] or is_worn:
            needs_restart.append(rank)
    return leaks, needs_restart


def _exception(failure: Failure) -> BaseException | None:
    """Return the exception that a worker sent, if it can be unpickled here."""
    if failure.pickled is None:
        return None
    try:
        exception: BaseException = pickle.loads(failure.pickled)  # noqa: S301 - our own child
    except Exception:  # noqa: BLE001 - a class that only the worker can import; its traceback is shown
        return None
    return exception


def _raise(name: str, outcomes: list[_Outcome], timeout_seconds: float) -> NoReturn:
    """Raise an error with the failures of all ranks, the first cause first; those that are alike are told once."""
    __tracebackhide__ = True
    failures = {rank: outcome.failure for rank, outcome in enumerate(outcomes) if outcome.failure is not None}
    deaths = {rank: outcome.death for rank, outcome in enumerate(outcomes) if outcome.death is not None}
    stacks = {rank: outcome.stack for rank, outcome in enumerate(outcomes) if outcome.stack is not None}
    order = sorted(failures, key=lambda rank: (_is_secondary(failures[rank]), failures[rank].at_seconds))
    exceptions = {rank: _exception(failures[rank]) for rank in order}
    parts = [f"the process of rank {rank} {death}" for rank, death in deaths.items()]
    ranks_of: dict[str, list[int]] = {}
    for rank in order:
        ranks_of.setdefault(failures[rank].text.rstrip(), []).append(rank)
    parts += [f"on rank{'s' * (len(each) > 1)} {', '.join(map(str, each))}:\n{text}" for text, each in ranks_of.items()]
    parts += [f"rank {rank} was still running; its threads were at:\n{stack}" for rank, stack in stacks.items()]
    text = "\n\n".join(parts)
    cause = exceptions[order[0]] if order else None
    if order and "builtins.Skipped" in failures[order[0]].kinds:  # which can't be pickled
        import pytest

        pytest.skip(failures[order[0]].summary.removeprefix("Skipped: "))
    if deaths:
        msg = f"`{name}`: {text}"
        raise RankDiedError(msg, next(iter(deaths)), exceptions) from cause
    if stacks and (not order or _is_secondary(failures[order[0]])):
        ranks = ", ".join(map(str, stacks))
        msg = f"`{name}` did not end within {timeout_seconds:g} s on ranks {ranks} of {len(outcomes)}.\n{text}"
        raise RankTimeoutError(msg, next(iter(stacks)), exceptions) from cause
    msg = f"`{name}` failed on ranks {', '.join(map(str, order))} of {len(outcomes)}; {text}"
    raise RankError(msg, order[0], exceptions) from cause


def _is_secondary(failure: Failure) -> bool:
    """Return whether a failure is only the consequence of another rank's."""
    return bool(_SECONDARY.search(failure.summary))
