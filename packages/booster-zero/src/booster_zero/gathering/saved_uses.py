"""What autograd keeps of parameters between forward and backward: notes of where their values are, not the values.

Saved tensors that are views of a gathered chunk are replaced by the number of their parameter and their place in it, so
that the chunk's memory can go; backward brings the chunk back when it needs them. Other tensors are kept as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import torch

from booster_runtime.saved_tensors import SavedTensorHooks

if TYPE_CHECKING:
    from torch import Tensor

    from booster_zero.engine.bucket import Bucket
    from booster_zero.gathering.manager import ChunkManager


class _Note(NamedTuple):
    """Where saved values are: in which parameter, from which of its bytes, and how they are read."""

    number: int
    start_bytes: int | torch.SymInt
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    is_conjugate: bool
    is_negative: bool
    version: int


class SavedUses(SavedTensorHooks):
    """Hooks on what autograd saves.

    Args:
        manager: The chunks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        super().__init__()
        self._manager = manager

    def take(self, tensor: Tensor) -> _Note | None:
        """Return where a tensor's values are, if they are a parameter's."""
        chunk = self._chunk_of(tensor)
        if chunk is None:
            return None
        itemsize, offset_bytes = chunk.format.working.itemsize, tensor.storage_offset() * tensor.itemsize
        position = bisect_right(chunk.plan.slots, offset_bytes // itemsize, key=lambda slot: slot.offset) - 1
        slot = chunk.plan.slots[position]
        return _Note(
            slot.index,
            offset_bytes - slot.offset * itemsize,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
            chunk.parameters[position]._version,  # noqa: SLF001
        )

    def _chunk_of(self, tensor: Tensor) -> Bucket | None:
        """Return the gathered chunk that a tensor is a view of, if it is."""
        if tensor.layout is not torch.strided:
            return None
        try:
            return self._manager.chunk_holding(tensor.data_ptr())
        except RuntimeError:  # inside of a function transform, which keeps it alive
            return None

    def give(self, taken: _Note) -> Tensor:
        """Return a parameter's values, which are gathered for it."""
        manager = self._manager
        parameter = manager.parameters[taken.number]
        if parameter._version != taken.version:  # noqa: SLF001
            msg = (
                f"Backward needs parameter '{manager.names[taken.number]}' as it was in forward, but it has been "
                "changed in place since, by `optimizer.step()` or by hand. Run backward before the step."
            )
            raise RuntimeError(msg)
        chunk = manager.chunk_of(taken.number)
        whole = manager.use_whole(chunk)
        slot = chunk.plan.slots[chunk.position_of[taken.number]]
        offset_bytes = slot.offset * chunk.format.working.itemsize + taken.start_bytes
        if taken.dtype == whole.dtype:
            found = whole.as_strided(taken.shape, taken.strides, offset_bytes // taken.dtype.itemsize)
        else:  # parameters begin at multiples of many elements, of whichever format
            found = torch.empty(0, dtype=taken.dtype, device=whole.device)
            found.set_(whole.untyped_storage(), offset_bytes // taken.dtype.itemsize, taken.shape, taken.strides)
        found = torch._conj(found) if taken.is_conjugate else found  # noqa: SLF001 - what sets the flag alone
        return torch._neg_view(found) if taken.is_negative else found  # noqa: SLF001 - the same
