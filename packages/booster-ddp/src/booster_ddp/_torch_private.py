"""What this package uses of torch beyond its public interface.

Names are checked when the package is imported, so that a release of torch without them is named at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_runtime.sharding import check_names

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

_NAMES = (
    "_C._current_graph_task_id",
    "_compile._disable_dynamo",
    "_utils._flatten_dense_tensors",
    "_utils._take_tensors",
    "_utils._unflatten_dense_tensors",
    "autograd.Variable._execution_engine.queue_callback",
    "distributed.GradBucket",
    "distributed.Reducer._check_reducer_finalized",
    "distributed.Reducer._reset_state",
    "distributed.Reducer.prepare_for_backward",
    "nn.modules.batchnorm._BatchNorm",
    "nn.parallel.DistributedDataParallel._sync_buffers",
)


check_names("booster-ddp", _NAMES)

from torch._compile import _disable_dynamo  # noqa: E402 - after the check
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors  # noqa: E402

flatten_dense_tensors: Any = _flatten_dense_tensors
unflatten_dense_tensors: Any = _unflatten_dense_tensors
take_tensors: Any = _take_tensors
"""Yields lists of tensors of one dtype, each of about so many bytes."""
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


def unfinished_reduction(ddp: DistributedDataParallel) -> RuntimeError | None:
    """Return torch's error if a DDP model waits for gradients of a reduction that has begun, else ``None``."""
    try:
        ddp.reducer._check_reducer_finalized()  # noqa: SLF001
    except RuntimeError as error:
        return error
    return None


def follow_outputs(ddp: DistributedDataParallel, outputs: Sequence[Tensor]) -> None:
    """Let a DDP model search for unused parameters from these tensors in place of those that it found."""
    ddp.reducer.prepare_for_backward(list(outputs))


def forget_used(ddp: DistributedDataParallel) -> None:
    """Let a DDP model forget which parameters were used since it last finished a reduction."""
    ddp.reducer._reset_state()  # noqa: SLF001


def send_buffers(ddp: DistributedDataParallel) -> None:
    """Replace the buffers of a DDP model by rank 0's.

    Collective: every rank of the world.
    """
    ddp._sync_buffers()  # type: ignore[no-untyped-call] # noqa: SLF001


def release(ddp: Any) -> None:
    """Free the buckets and hooks of a DDP model that is no longer in use; backward through its outputs stays possible.

    DDP's outputs ask for the model's reducer in backward, and need no more of it than that it may be ``None``.
    """
    ddp.reducer = ddp.logger = None
