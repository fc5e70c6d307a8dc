"""How much of a large tensor is worked on at once, where what is made on the way should be small."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_stands_for_device: ContextVar[bool] = ContextVar("booster host tensors of a plan", default=False)
"""Whether this thread's tensors of the host stand for those of an accelerator."""


def block_bytes(device: torch.device, on_host: int, on_device: int) -> int:
    """Return the size of a block.

    Args:
        device: Where the tensor is.
        on_host: For the CPU, so that a block stays in its cache.
        on_device: For an accelerator, where starting an operation takes longer than running a small one.
    """
    return on_host if device.type == "cpu" and not _stands_for_device.get() else on_device


@contextlib.contextmanager
def host_stands_for_device() -> Iterator[None]:
    """Let this thread take an accelerator's blocks of the host's tensors, which stand for its in a plan."""
    token = _stands_for_device.set(True)
    try:
        yield
    finally:
        _stands_for_device.reset(token)
