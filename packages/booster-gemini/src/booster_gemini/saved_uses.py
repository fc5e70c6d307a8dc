"""What autograd keeps of parameters between forward and backward: notes of where their values are, not the values.

Saved tensors that are views of a gathered chunk are replaced by the number of their parameter and their place in it, so
that the chunk's memory can go; backward brings the chunk back when it needs them. Other tensors are kept as they are.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from booster_gemini.chunk.manager import ChunkManager
    from booster_zero.engine import Bucket

_CHECKPOINT = "torch.utils.checkpoint"
"""The module whose hooks save nothing, or what was just recomputed."""


@dataclass(frozen=True)
class _Note:
    """Where saved values are: in which parameter, from which of its bytes, and how they are read."""

    index: int
    start_bytes: int | torch.SymInt
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    is_conjugate: bool
    is_negative: bool
    version: int


@dataclass(frozen=True)
class _Kept:
    """What somebody else's hooks keep."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class SavedUses:
    """Hooks on what autograd saves.

    Args:
        manager: The chunks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._others: list[Any] = []
        self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def push(self, *, before_saving: bool = False) -> bool:
        """Look at what is saved from now on, and return whether that is so.

        It is not where nothing is saved, and under a checkpoint, which saves nothing either. What others keep in
        their way, they are still asked to keep.

        Args:
            before_saving: Gradients are off now, but will be on again when something is saved.
        """
        if not torch.is_grad_enabled() and not before_saving:
            return False
        autograd: Any = torch._C._autograd  # noqa: SLF001 - torch's own hooks ask so
        if not autograd._saved_tensors_hooks_is_enabled():  # noqa: SLF001
            return False
        others = autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003, SLF001
        if others is not None and (others[0] == self._pack or _CHECKPOINT in others[0].__module__):
            return False
        self._others.append(others)
        self._context.__enter__()
        return True

    def pop(self) -> None:
        """Stop what `push` has begun."""
        self._others.pop()
        self._context.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - as torch's own modes do
            chunk = self._chunk_of(tensor)
            if chunk is None:
                others = self._others[-1]
                if others is not None:
                    return _Kept(others[0](tensor), others[1])
                # Detached: an output would keep its own graph alive, and that the output. It has the same version.
                return tensor.detach(), tensor._version  # noqa: SLF001 - autograd's own check, which hooks switch off
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
        """Return the gathered chunk that a tensor is a view of, if it is; a sparse one has no storage to ask."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        return self._manager.chunk_holding(storage.data_ptr()) if storage.nbytes() else None

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Note):
            return self._fetched(saved)
        if isinstance(saved, _Kept):
            return saved.unpack(saved.packed)
        tensor: Tensor
        tensor, version = saved
        if tensor._version != version:  # noqa: SLF001
            msg = (
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected version {version}."  # noqa: SLF001
            )
            raise RuntimeError(msg)
        return tensor

    def _fetched(self, note: _Note) -> Tensor:
        manager = self._manager
        parameter = manager.parameters[note.index]
        if parameter._version != note.version:  # noqa: SLF001
            msg = (
                f"Backward needs parameter '{manager.names[note.index]}' as it was in forward, but it has been changed "
                "in place since, by `optimizer.step()` or by hand. Run backward before the step."
            )
            raise RuntimeError(msg)
        chunk = manager.chunk_of(note.index)
        manager.use(chunk)
        slot = next(slot for slot in chunk.plan.slots if slot.index == note.index)
        assert chunk.whole is not None, "what is in use has been gathered"
        offset_bytes = slot.offset * chunk.format.working.itemsize + note.start_bytes
        if note.dtype == chunk.whole.dtype:
            found = chunk.whole.as_strided(note.shape, note.strides, offset_bytes // note.dtype.itemsize)
        else:  # parameters begin at multiples of many elements, of whichever format
            found = torch.empty(0, dtype=note.dtype, device=chunk.whole.device)
            found.set_(chunk.whole.untyped_storage(), offset_bytes // note.dtype.itemsize, note.shape, note.strides)
        found = torch._conj(found) if note.is_conjugate else found  # noqa: SLF001 - what sets the flag alone
        return torch._neg_view(found) if note.is_negative else found  # noqa: SLF001 - the same
