"""The one door to collectives on flat buffers.

They travel by `torch.distributed`; see `booster_runtime.collectives.transport`.

On the CPU, sums are computed in rank order, and in fp32 for narrow dtypes, so a result depends neither on timing nor on
which elements share a buffer. On devices the backend sums, in its own order and in the dtype that is sent.

A flat buffer is cut into one slice per rank of the group by ``bounds``: rank ``r`` holds
``buffer[bounds[r]:bounds[r + 1]]``. Slices may be uneven or empty. A ``range`` says in a few bytes that they are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster_core.ranks import OBSERVERS
from booster_runtime.collectives.groups import new_groups
from booster_runtime.collectives.pending import WAITS, Pending
from booster_runtime.collectives.sums import sum_into
from booster_runtime.collectives.transport import Transport, in_place_terms, made_by, transport_of
from booster_runtime.collectives.watched import WatchedTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = [
    "WAITS",
    "Pending",
    "Transport",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "in_place_terms",
    "is_by_torch",
    "made_by",
    "new_groups",
    "reduce_scatter",
    "same_on_all",
    "sum_into",
]


def reduce_scatter(
    source: Tensor | Sequence[tuple[int, Tensor]],
    bounds: Sequence[int],
    out: Tensor,
    group: ProcessGroup | None = None,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    scratch: Tensor | None = None,
) -> Pending:
    """Start summing a flat buffer over ranks; each rank receives its slice of the sum.

    Args:
        source: The buffer, sent in its dtype and not changed: shape ``(bounds[-1],)``, contiguous; or, on the CPU, the
            parts in which it is stored, so that nobody copies them together. A part is its offset in the buffer and
            its values, contiguous, all of one dtype. Parts don't overlap; offsets and shapes are the same on every
            rank. Of a part of two dimensions a rank sends just the rows that are not zero, where they are at most a
            quarter: what is not zero is found by looking, so that it holds whatever a model does with it.
        bounds: Start and end of each slice, one entry more than ranks; may end beyond the parts.
        out: This rank's slice of the sum, any floating dtype; written by ``wait``. Elements that no part covers keep
            their values. On the CPU narrow dtypes are summed in fp32, in rank order; on devices by the backend, in the
            dtype of ``source``. In fp16 it averages, which does not overflow.
        group: The ranks that take part; ``None`` for all.
        scale: Multiplies the sum.
        accumulate: Add to ``out`` instead of replacing it.
        scratch: On the CPU, 1-D memory of the source's dtype to receive into; leave it alone until ``wait`` has
            returned. Fresh memory costs as much as a copy. What does not fit is allocated.

    Returns:
        The pending operation. Wait for it before you read ``out`` or write ``source``.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    return _transport(group).reduce_scatter(source, bounds, out, scale=scale, accumulate=accumulate, scratch=scratch)


def all_gather(buffer: Tensor, bounds: Sequence[int], group: ProcessGroup | None = None) -> Pending:
    """Start filling a flat buffer with every rank's slice, in place.

    Args:
        buffer: Shape ``(bounds[-1],)``, contiguous, any dtype; holds this rank's slice.
        bounds: Start and end of each slice, one entry more than ranks.
        group: The ranks that take part; ``None`` for all.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    return _transport(group).all_gather(buffer, bounds)


def all_to_all(
    source: Tensor,
    sent: Sequence[int],
    out: Tensor,
    received: Sequence[int],
    group: ProcessGroup | None = None,
) -> Pending:
    """Start sending each rank its slice of a flat buffer, and receiving every rank's slice for this one.

    Ranks that have nothing for each other exchange no message on the CPU, so this also passes a tensor on to one
    neighbour.

    Args:
        source: Shape ``(sent[-1],)``, contiguous, any dtype.
        sent: Start and end of the slice for each rank in ``source``, one entry more than ranks.
        out: Shape ``(received[-1],)``, contiguous, of the same dtype; shares no memory with ``source``.
        received: Start and end of each rank's slice in ``out``; as long as that rank's ``sent`` says.
        group: The ranks that take part; ``None`` for all.

    Returns:
        The pending operation. Wait for it before you read ``out`` or write ``source``.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    return _transport(group).all_to_all(source, sent, out, received)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: ProcessGroup | None = None) -> Pending:
    """Start combining a tensor over ranks, in place and to the same bits on each.

    On the CPU, ``SUM`` and ``AVG`` of floating tensors are computed in rank order, bf16 and fp16 in fp32 with one
    rounding at the end. Integers, ``MAX`` and ``MIN`` are exact in any order. On devices, and for complex tensors, the
    backend combines in its own order: NCCL in the order of its ring or tree, which depends on the number of ranks, the
    topology and the size of the tensor, rounding bf16 and fp16 after each addition.

    Args:
        tensor: Any shape; contiguous.
        op: A ``torch.distributed.ReduceOp`` that the backend has. ``AVG`` works on the CPU too, for floating tensors.
        group: The ranks that take part; ``None`` for all.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    return _transport(group).all_reduce(tensor, op)


def same_on_all(number: int, group: ProcessGroup | None) -> bool:
    """Return whether all ranks of a group give the same number. Call it with the host's ranks: it waits.

    gloo ends a process where ranks gather tensors of different sizes, so they tell each other before what they gather.

    Args:
        number: Of at most 63 bits and a sign.
        group: The ranks; ``None`` for all.

    Collective: every rank of ``group``.
    """
    told = torch.tensor([number, ~number])
    all_reduce(told, dist.ReduceOp.MAX, group).wait()
    largest, complement = told.tolist()
    return bool(largest == ~complement)


def is_by_torch(tensor: Tensor, group: ProcessGroup | None) -> bool:
    """Return whether torch's own collectives move a tensor, as on devices.

    Args:
        tensor: The tensor.
        group: Among these ranks; ``None`` for all.

    Collective: none.
    """
    return transport_of(group).is_by_torch(tensor)


def broadcast(tensor: Tensor, group: ProcessGroup | None = None) -> Pending:
    """Start copying the tensor of a group's first rank to the others, in place.

    Args:
        tensor: Any shape; contiguous.
        group: The ranks that take part; ``None`` for all.

    Collective: every rank of ``group``, in the same order among calls of this module.
    """
    return _transport(group).broadcast(tensor)


def all_gather_object(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's small Python object, in rank order.

    Collective: every rank of ``group``.
    """
    return _transport(group).all_gather_object(value)


def _transport(group: ProcessGroup | None) -> Transport:
    """Return the transport of a group, observed where somebody does."""
    transport = transport_of(group)
    return WatchedTransport(transport, group) if OBSERVERS else transport
