"""What autograd keeps of parameters between forward and backward: notes of where their values are, not the values.

Saved tensors that are views of a gathered bucket are replaced by the number of their parameter and their place in it,
so that the bucket's memory can go; backward brings the bucket back when it needs them. Other tensors are kept as they
are.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass

from booster_runtime.saved_tensors import SavedTensorHooks

if TYPE_CHECKING:
    from torch import Tensor

    from booster_zero.engine.gatherer import Gatherer


class _Note(NamedTuple):
    """Where saved values are: in which parameter, from which of its bytes, and how they are read."""

    number: int
    start_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    is_conjugate: bool
    is_negative: bool
    version: int


class SavedUses(SavedTensorHooks):
    """Hooks on what autograd saves.

    Args:
        gatherer: Gathers the buckets.
    """

    def __init__(self, gatherer: Gatherer) -> None:
        super().__init__()
        self._gatherer = gatherer

    def take(self, tensor: Tensor) -> _Note | None:
        """Return where a tensor's values are, if they are a parameter's."""
        if tensor.layout is not torch.strided:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # inside of a function transform, which keeps it alive
            return None
        addresses, bucket_at = self._gatherer.addresses, self._gatherer.bucket_at
        while place := bisect_right(addresses, address):
            begin = addresses[place - 1]
            bucket = bucket_at[begin]
            if bucket.address == begin:
                break
            del addresses[place - 1], bucket_at[begin]  # it has been released since
        else:
            return None
        start = address - begin
        if start >= bucket.whole_bytes:
            return None
        position = bisect_right(bucket.byte_offsets, start) - 1
        return _Note(
            bucket.plan.slots[position].index,
            start - bucket.byte_offsets[position],
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.dtype.is_complex and tensor.is_conj(),
            tensor.is_neg(),
            bucket.parameters[position]._version,  # noqa: SLF001
        )

    def give(self, taken: _Note) -> Tensor:
        """Return a parameter's values, which are gathered for it."""
        gatherer = self._gatherer
        parameter = gatherer.layout.every[taken.number]
        with DisableTorchFunctionSubclass():  # an absent one would ask what the use is
            version = parameter._version  # noqa: SLF001
        if version != taken.version:
            msg = (
                f"Backward needs parameter '{gatherer.layout.names[taken.number]}' as it was in forward, but it has "
                "been changed in place since, by `optimizer.step()` or by hand. Run backward before the step."
            )
            raise RuntimeError(msg)
        bucket = gatherer.layout.bucket_by_index[taken.number]
        whole = gatherer.use_whole(bucket)
        offset_bytes = bucket.byte_offsets[bucket.position_of[taken.number]] + taken.start_bytes
        if taken.dtype == whole.dtype:
            found = whole.as_strided(taken.shape, taken.strides, offset_bytes // taken.dtype.itemsize)
        else:  # parameters begin at multiples of many elements, of whichever format
            found = torch.empty(0, dtype=taken.dtype, device=whole.device)
            found.set_(whole.untyped_storage(), offset_bytes // taken.dtype.itemsize, taken.shape, taken.strides)
        found = torch._conj(found) if taken.is_conjugate else found  # noqa: SLF001 - what sets the flag alone
        return torch._neg_view(found) if taken.is_negative else found  # noqa: SLF001 - the same
