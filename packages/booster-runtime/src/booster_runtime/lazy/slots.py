"""The storages of a recording, by number: what identifies one, how large it is, and whether a view is all of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from booster_runtime.lazy.log import Ref

if TYPE_CHECKING:
    import torch

    from booster_runtime.lazy.tensor import LazyTensor


class Slots:
    """Numbers storages in the order in which they are met.

    Attributes:
        devices: Where each storage is recorded to lie.
    """

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self._storages: list[torch.UntypedStorage] = []
        self._number_of: dict[int, int] = {}

    def ref_of(self, tensor: LazyTensor) -> Ref:
        """Return a tensor's place in the recording."""
        inner = tensor.lazy_inner
        return Ref(
            self._number(inner, tensor.device),
            inner.dtype,
            tensor.device,
            tuple(inner.size()),
            inner.stride(),
            int(inner.storage_offset()),
        )

    def knows(self, inner: torch.Tensor) -> bool:
        """Return whether a meta tensor is a view of a storage that has a number."""
        return inner.untyped_storage()._cdata in self._number_of  # noqa: SLF001 - what identifies a storage

    def covers(self, ref: Ref) -> bool:
        """Return whether a view is all of its storage."""
        if math.prod(ref.size) * ref.dtype.itemsize != self._storages[ref.slot].nbytes():
            return False
        steps = sorted((stride, size) for stride, size in zip(ref.stride, ref.size, strict=True) if size > 1)
        expected = 1
        for stride, size in steps:
            if stride != expected:
                return False
            expected *= size
        return True

    def num_bytes(self) -> list[int]:
        """Return the size of each storage."""
        return [storage.nbytes() for storage in self._storages]

    def _number(self, inner: torch.Tensor, device: torch.device) -> int:
        storage = inner.untyped_storage()
        number = self._number_of.get(storage._cdata)  # noqa: SLF001 - as above
        if number is None:
            number = self._number_of[storage._cdata] = len(self._storages)  # noqa: SLF001
            self._storages.append(storage)  # kept, so that its address stays its own
            self.devices.append(device)
        return number
