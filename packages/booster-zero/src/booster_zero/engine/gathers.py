"""Gathers of updated parameters that go on after ``step``, each waited for before the first use of what it brings.

What waits, and for what:

- inside of the boosted model's ``forward``, every call of a torch function waits for the buckets in whose memory any of
  its arguments is: parameters, and views of them, wherever they are used (tied heads, ``F.linear(x, other.weight)``,
  layers that are run repeatedly); and every module waits for its own parameters before it runs, which covers kernels
  that torch's functions don't know of;
- a module that is called from outside of that forward, compiled and scripted modules inside of it, and
  ``state_dict`` and ``load_state_dict`` of the user's own model wait for everything;
- so does whatever is asked of the boosted model (its parameters, modules, attributes, methods), of its state
  (checkpoints, averages), ``backward``, the next ``step``, and the end of ``forward``.

What can't wait is a read that none of these see: of a parameter held by the user's own hands between ``step`` and the
next forward, without the boosted model; of another module's parameter inside of ``forward`` by a kernel that is none of
torch's functions; or by another thread.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from booster_core.ranks import NamedCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_runtime.collectives import Pending
    from booster_zero.engine.bucket import Bucket


class Wholes(Protocol):
    """Brings whole values to where they are used: what a sharded optimizer tells it.

    Collective: its methods are called on every rank of the world.
    """

    def begin_backward(self) -> None:
        """Make ready for a backward."""

    def end_backward(self) -> None:
        """End a backward, also one that raised."""

    def begin_step(self, buckets: Sequence[Bucket], names: Mapping[int, str]) -> None:
        """Make ready for an update of the buckets' parameters."""

    def end_step(self, published: Mapping[Bucket, Pending]) -> None:
        """Let the next use of buckets see what the optimizer updated; see `Bucket.publish`."""


class Gathers:
    """The gathers that are underway, of buckets whose whole values are always here.

    They are waited for, too, when the object goes or the process ends: gloo's threads write into the buckets until
    then.

    Args:
        overlaps: Let a step return while updated parameters are still being gathered.
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._pending: dict[int, Pending] = {}
        self._is_in_forward = False
        weakref.finalize(self, _wait_quietly, self._pending)

    # ---- what the optimizer tells

    def begin_backward(self) -> None:
        """Wait for everything."""
        self.wait()

    def end_backward(self) -> None:
        """Do nothing: the whole values stay."""

    def begin_step(self, buckets: Sequence[Bucket], names: Mapping[int, str]) -> None:
        """Wait for everything, and take in what somebody else has written into parameters.

        Raises:
            ConfigError: If a parameter was given other memory since it was laid out.
        """
        self.wait()
        for bucket in buckets:
            bucket.notice_changes(names)

    def end_step(self, published: Mapping[Bucket, Pending]) -> None:
        """Wait for updated parameters; where gathers overlap, on first use alone."""
        if not self._overlaps:
            for pending in published.values():
                pending.wait()
        for bucket in published:
            bucket.mark_changed()
        if self._overlaps:
            for bucket, pending in published.items():
                assert bucket.whole is not None, "what is published is whole"
                if bucket.whole.numel():
                    self._pending[_address(bucket.whole)] = pending
                else:
                    pending.wait()

    # ---- waiting

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Return once everything is there.

        Collective: none; the gathers were entered when they were started.
        """
        while self._pending:
            self._end(next(iter(self._pending)))

    def wait_for(self, arguments: Iterable[Any]) -> None:
        """Return once the memory of all tensors among some arguments, inside of lists and the like too, is there."""
        for argument in arguments:
            if not self._pending:
                return
            if isinstance(argument, torch.Tensor):
                self._wait_for_tensor(argument)
            elif isinstance(argument, (list, tuple)):
                self.wait_for(argument)
            elif isinstance(argument, dict):
                self.wait_for(argument.values())

    @contextlib.contextmanager
    def during_forward(self, model: nn.Module) -> Iterator[None]:
        """Run the model's forward inside: its uses of parameters wait, and its end waits for the rest."""
        if not self._pending:
            yield
            return
        if any(_runs_out_of_sight(module) for module in model.modules()):
            self.wait()
        self._is_in_forward = True
        try:
            with _WaitingForArguments(self):
                yield
        finally:
            self._is_in_forward = False
            self.wait()

    @property
    def is_underway(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._pending)

    def watch(self, model: nn.Module) -> list[Any]:
        """Let modules wait before they run or show their state; return the handles of the hooks."""
        handles: list[Any] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(self._before_module))
                handles.append(module.register_state_dict_pre_hook(self._before_state))  # type: ignore[no-untyped-call]
                handles.append(module.register_load_state_dict_pre_hook(self._before_state))  # type: ignore[no-untyped-call]
        return handles

    def _before_module(self, module: nn.Module, arguments: Any) -> None:
        del arguments
        if torch.compiler.is_compiling() or not self._pending:
            return  # a compiled module's caller has waited
        if self._is_in_forward:
            self.wait_for(module._parameters.values())  # noqa: SLF001 - its own, without a generator for each call
        else:
            self.wait()

    def _before_state(self, *_: Any) -> None:
        self.wait()

    def _wait_for_tensor(self, tensor: Tensor) -> None:
        try:
            address = _address(tensor)
        except (RuntimeError, NotImplementedError):  # wrapped by a transform, sparse, or the like
            self.wait()
            return
        if address in self._pending:
            self._end(address)

    def _end(self, address: int) -> None:
        with NamedCall("gather of parameters"):
            self._pending[address].wait()
        del self._pending[address]


class _WaitingForArguments(TorchFunctionMode):
    """Lets every call of a torch function wait for its arguments."""

    def __init__(self, gathers: Gathers) -> None:
        super().__init__()
        self._gathers = gathers

    # Not traced: a compiled function that forward calls breaks its graph at each call while gathers are underway, where
    # tracing would wait once and for all. With ``fullgraph=True`` that raises. Compile modules, which are waited for.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        gathers = self._gathers
        if gathers._pending:  # noqa: SLF001 - the other half of that class
            gathers.wait_for(args)
            if kwargs:
                gathers.wait_for(kwargs.values())
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _runs_out_of_sight(module: nn.Module) -> bool:
    """Whether a module's forward reads parameters without calling torch's functions from Python."""
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
    return is_compiled or isinstance(module, torch.jit.ScriptModule)


def _wait_quietly(pending: dict[int, Pending]) -> None:
    with contextlib.suppress(RuntimeError):
        for each in pending.values():
            each.wait()
    pending.clear()
