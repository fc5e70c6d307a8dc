"""Real tensors that recorded operations read: copied where that is cheap or someone else may write, else watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_runtime.lazy.log import Const

if TYPE_CHECKING:
    import torch

_COPY_NUMEL = 4096
"""Real tensors up to this size are copied when they are read; larger ones just before they change."""


class Consts:
    """The real tensors that a recording reads."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Const]] = {}

    def read(self, tensor: torch.Tensor) -> Const:
        """Return what stands for a tensor in the recording."""
        if tensor.numel() <= _COPY_NUMEL or not _is_torchs_own(tensor):
            return Const(tensor.clone(), is_watched=False)
        watched = self._by_storage.setdefault(tensor.untyped_storage()._cdata, [])  # noqa: SLF001 - identifies it
        known = next((const for const in watched if const.is_view(tensor)), None)
        if known is not None:
            return known
        watched.append(Const(tensor, is_watched=True))
        return watched[-1]

    def before_write(self, target: torch.Tensor) -> None:
        """Keep the values that were recorded of a real tensor that is about to change."""
        if target.device.type == "meta":
            return
        for const in self._by_storage.pop(target.untyped_storage()._cdata, []):  # noqa: SLF001 - as above
            const.keep()


def _is_torchs_own(tensor: torch.Tensor) -> bool:
    """Return whether only torch writes to a tensor's memory, and so counts the writes.

    NumPy, a buffer or another process that shares the memory writes without a count. Torch can resize its own memory
    only, and gives that up for what it has shown to NumPy.
    """
    storage = tensor.untyped_storage()
    # Torch calls all of CUDA's memory shared.
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())
