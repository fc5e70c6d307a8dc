"""What this package uses of torch beyond its public interface.

Names are checked when the package is imported, so that a release of torch without them is named at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import parallel

from booster_runtime.sharding import check_names

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

    from torch import Tensor

_NAMES = (
    "_C._are_functorch_transforms_active",
    "_C._current_graph_task_id",
    "_compile._disable_dynamo",
    "autograd.Variable._execution_engine.queue_callback",
    "autograd.grad_mode._unsafe_preserve_version_counter",
    "distributed.GradBucket",
    "distributed.Reducer._check_reducer_finalized",
    "distributed.Reducer._reset_state",
    "distributed.Reducer.prepare_for_backward",
    "nn.modules.batchnorm._BatchNorm",
    "nn.parallel.DistributedDataParallel._sync_buffers",
)


check_names("booster-ddp", _NAMES)

from torch._compile import _disable_dynamo  # noqa: E402 - after the check
from torch.autograd.grad_mode import _unsafe_preserve_version_counter  # noqa: E402

# The public decorator imports the compiler at once.
not_compiled = _disable_dynamo
"""Decorator: run a function, and what it calls, uncompiled."""
not_compiled_itself = _disable_dynamo(recursive=False)
"""Decorator: run a function uncompiled, but let what it calls be compiled."""

# The number of the backward that this thread is in, as `torch.autograd.graph` identifies them. No function around it:
# each parameter's hook calls it.
graph_task = torch._C._current_graph_task_id  # noqa: SLF001


def queue_callback(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method, if its object lives, at the end of the backward that this thread is in."""

    def call() -> None:
        if (bound := method()) is not None:
            bound()

    torch.autograd.Variable._execution_engine.queue_callback(call)  # noqa: SLF001


@not_compiled
def transforms_are_active() -> bool:
    """Return whether a transform of ``torch.func`` is running what is called now."""
    return bool(torch._C._are_functorch_transforms_active())  # noqa: SLF001


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's class, whose broadcast of buffers leaves the graphs of earlier forwards usable.

    A layer such as BatchNorm updates its buffers in forward without telling autograd, so that one process may run two
    forwards before the first backward. DDP's broadcast before each forward changes the same buffers. torch 2.10 lets
    autograd count that as a change, and the first backward raises; later releases hide it, as this class does.
    """

    @not_compiled  # the compiler leaves torch's own class alone
    def _sync_buffers(self) -> None:
        with _unsafe_preserve_version_counter(tuple(self.modules_buffers)):  # as torch 2.13
            super()._sync_buffers()  # type: ignore[no-untyped-call]


def unfinished_reduction(ddp: parallel.DistributedDataParallel) -> RuntimeError | None:
    """Return torch's error if a DDP model waits for gradients of a reduction that has begun, else ``None``."""
    try:
        ddp.reducer._check_reducer_finalized()  # noqa: SLF001
    except RuntimeError as error:
        return error
    return None


def follow_outputs(ddp: parallel.DistributedDataParallel, outputs: Sequence[Tensor]) -> None:
    """Let a DDP model search for unused parameters from these tensors in place of those that it found."""
    ddp.reducer.prepare_for_backward(list(outputs))


def forget_used(ddp: parallel.DistributedDataParallel) -> None:
    """Let a DDP model forget which parameters were used since it last finished a reduction."""
    ddp.reducer._reset_state()  # noqa: SLF001


def send_buffers(ddp: parallel.DistributedDataParallel) -> None:
    """Replace the buffers of a DDP model by rank 0's.

    Collective: every rank of the world.
    """
    ddp._sync_buffers()  # type: ignore[no-untyped-call] # noqa: SLF001


def release(ddp: Any) -> None:
    """Free the buckets and hooks of a DDP model that is no longer in use; backward through its outputs stays possible.

    DDP's outputs ask for the model's reducer in backward, and need no more of it than that it may be ``None``.
    """
    ddp.reducer = ddp.logger = None
