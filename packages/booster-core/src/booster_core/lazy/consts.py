"""Real tensors that recorded operations read: copied where they are small or about to change, else watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.lazy.log import Const

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
        is_copied = tensor.numel() <= _COPY_NUMEL
        const = Const(tensor.clone() if is_copied else tensor, 0)
        const.version = const.tensor._version  # noqa: SLF001 - the counter has no public name
        if not is_copied:
            storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - what identifies a storage
            self._by_storage.setdefault(storage, []).append(const)
        return const

    def before_write(self, target: torch.Tensor) -> None:
        """Keep the values that were recorded of a real tensor that is about to change."""
        if target.device.type == "meta":
            return
        for const in self._by_storage.pop(target.untyped_storage()._cdata, []):  # noqa: SLF001 - as above
            const.tensor = const.get().clone()
            const.version = const.tensor._version  # noqa: SLF001
