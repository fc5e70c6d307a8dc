"""`on_ranks`: run split layers for all ranks of a group within one process, without communication.

Each rank has a thread, of which one runs at a time: until its next collective, where the next rank goes on. Once every
rank has come there, the result is known. What a rank has changed in the model is taken out while others run, so that
all of them work on one and the same model: the user's own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from booster_core.errors import ConfigError
from booster_hybrid.mesh import RankGroup
from booster_hybrid.probe.calls import eager
from booster_hybrid.probe.running import ModuleState
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

T = TypeVar("T")
_CPU = torch.device("cpu")
_TURN_SECONDS = 120.0
"""How long a rank may compute between two collectives; one that waits for another rank, without a turn, never ends."""


class _AbandonedError(BaseException):
    """Ends a rank that waits, as another one has failed; not an `Exception`, which layers may catch."""


@dataclass(frozen=True)
class _Call:
    """A collective that a rank takes part in.

    Args:
        kind: Its name.
        given: What the rank gives.
        bounds: Where in it the part for each rank starts and ends.
    """

    kind: str
    given: Tensor
    bounds: tuple[int, ...] = ()

    @property
    def form(self) -> tuple[str, torch.Size | None]:
        """What all ranks have to agree on."""
        return self.kind, None if self.kind == "all_to_all" else self.given.shape


class _Turn:
    """A rank's place among its collectives, and the thread in which it runs while it has its turn.

    Attributes:
        call: The collective at which it waits; ``None`` before the first one, and at its end.
        answer: The result of that collective.
    """

    def __init__(self) -> None:
        self.call: _Call | None = None
        self.answer: Tensor | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def begin(self, name: str, work: Callable[[], None]) -> None:
        """Start the rank's thread, which waits for its first turn."""
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run, work), name=name, daemon=True
        )
        self._thread.start()

    def go_on(self) -> None:
        """Let the rank run until its next collective or its end; raise what it raises.

        Raises:
            ConfigError: If it takes too long: ranks take turns, and one may hold what this one waits for.
        """
        self._may_run.release()
        if not self._has_stopped.acquire(timeout=_TURN_SECONDS):
            msg = (
                f"A layer waits for more than {_TURN_SECONDS:.0f} s while `boost` checks it, maybe for a lock that the "
                "same layer holds for another rank while that takes part in a collective. Hold no lock around layers "
                "that are split."
            )
            raise ConfigError(msg)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def meet(self, call: _Call) -> Tensor:
        """Wait at a collective, and return its result; this rank's thread calls it."""
        if not self._is_abandoned:
            self.call = call
            self._has_stopped.release()
            self._may_run.acquire()
            self.call, answer, self.answer = None, self.answer, None
            if answer is not None:
                return answer
        raise _AbandonedError

    def abandon(self) -> None:
        """End the rank where it waits."""
        if self._thread is not None:
            self._is_abandoned, self.answer = True, None
            self._may_run.release()
            self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        self._may_run.acquire()
        try:
            if not self._is_abandoned:
                work()
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - whoever waits for this rank raises it
            self._error = error
        finally:
            self._has_stopped.release()


@dataclass(frozen=True)
class InProcessRank(RankGroup):
    """One rank of a group that exists within this process only.

    Args:
        group: Always ``None``.
        rank: The rank's index.
        size: Number of ranks.
        turn: Where it is among its collectives.
    """

    turn: _Turn = field(default_factory=_Turn, compare=False)

    def all_reduce(self, tensor: Tensor) -> collectives.Pending:
        """Fill in the sum over ranks."""
        tensor.copy_(self._result("all_reduce", tensor))
        return collectives.Pending()

    def all_gather(self, buffer: Tensor, bounds: Sequence[int]) -> collectives.Pending:
        """Fill in the slices of all ranks."""
        own = torch.zeros_like(buffer)  # so that a sum puts the slices together
        own[bounds[self.rank] : bounds[self.rank + 1]] = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        buffer.copy_(self._result("all_gather", own))
        return collectives.Pending()

    def reduce_scatter(self, source: Tensor, bounds: Sequence[int], out: Tensor) -> collectives.Pending:
        """Fill in this rank's slice of the sum over ranks."""
        out.copy_(self._result("reduce_scatter", source)[bounds[self.rank] : bounds[self.rank + 1]])
        return collectives.Pending()

    def all_to_all(
        self, source: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]
    ) -> collectives.Pending:
        """Fill in the slices that the ranks send here."""
        result = self._result("all_to_all", source, sent)
        out[received[0] : received[-1]].copy_(result)
        return collectives.Pending()

    def _result(self, kind: str, given: Tensor, bounds: Sequence[int] = ()) -> Tensor:
        with _disable_current_modes():  # selective checkpointing would expect the copy in the recomputation
            call = _Call(kind, given.detach().clone(), tuple(bounds))
        return self.turn.meet(call)


def on_ranks(
    size: int,
    run: Callable[[InProcessRank], T],
    modules: Iterable[nn.Module] = (),
    device: torch.device = _CPU,
) -> list[T]:
    """Run a function for every rank of a group within this process, and return what it gives.

    Args:
        size: Number of ranks.
        run: Called with each rank.
        modules: What it changes, which each rank finds as it is now, and which is put back at the end.
        device: Where it computes.

    Raises:
        ConfigError: If ranks take part in different collectives, which would wait for each other.
        Exception: What the function raises for any rank.
    """
    results: dict[int, T] = {}
    # What torch keeps for the process and not for a thread is set before the first rank and reset after the last one.
    with eager(), _Around():  # type: ignore[no-untyped-call]
        here, before = _Here(device), ModuleState(modules)

        def work(rank: InProcessRank) -> None:
            with here.entered():
                results[rank.rank] = run(rank)

        ranks = [InProcessRank(None, rank, size) for rank in range(size)]
        try:
            for each in ranks:
                each.turn.begin(f"booster-rank-{each.rank}", functools.partial(work, each))
            _take_turns([each.turn for each in ranks], before)
        finally:
            for each in ranks:
                each.turn.abandon()
            before.put_back()
    return [results[rank] for rank in range(size)]


def _take_turns(turns: Sequence[_Turn], before: ModuleState) -> None:
    """Let each rank run to its next collective, with the modules as it has left them, until all have ended."""
    states = [before for _ in turns]
    while True:
        for index, each in enumerate(turns):
            states[index].put_back()
            each.go_on()
            states[index] = before.now()
        stopped = [each.call for each in turns if each.call is not None]
        if not stopped:
            return
        if len(stopped) < len(turns) or len({call.form for call in stopped}) > 1:
            msg = "ranks would take part in different collectives"
            raise ConfigError(msg)
        for each, answer in zip(turns, _answers(stopped), strict=True):
            each.answer = answer


class _Here:
    """What torch keeps for a thread, of the thread that makes this: its modes, autocast, and whether gradients are on.

    Args:
        device: Where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._has_gradients, self._infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in {"cpu", device.type}
        }
        self._operations = _get_current_dispatch_mode_stack()
        self._functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread have the same, and run backward itself: a thread for all ranks would wait for itself."""
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._infers))
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            for kind, (dtype, is_enabled) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled=is_enabled))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # inside: inference mode sets it, too
            # Not by `with`, which a mode may use to note that it begins.
            for mode in self._functions:
                _push_function_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(_pop_function_mode)
            for mode in self._operations:
                _push_dispatch_mode(mode)
                stack.callback(_pop_dispatch_mode, vars(mode).get("_mode_key"))
            yield


class _Around(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does nothing: while it is entered, other modes find the process alike, in whatever order threads leave them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        del types
        return func(*args, **(kwargs or {}))


def _answers(stopped: Sequence[_Call]) -> list[Tensor]:
    """Return what a collective gives to each rank."""
    if stopped[0].kind == "all_to_all":
        return [
            torch.cat([each.given[each.bounds[rank] : each.bounds[rank + 1]] for each in stopped])
            for rank in range(len(stopped))
        ]
    total = stopped[0].given
    for each in stopped[1:]:
        total = total + each.given
    return [total] * len(stopped)
