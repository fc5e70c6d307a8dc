"""What is different where tensors stand for others, as in a plan: sizes of blocks, and values that are not there."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_stands_for_device: ContextVar[bool] = ContextVar("booster host tensors of a plan", default=False)
"""Whether this thread's tensors of the host stand for those of an accelerator."""


_has_values: ContextVar[bool] = ContextVar("booster tensors with values", default=True)
"""Whether this thread's tensors have the values that were computed."""


def has_values() -> bool:
    """Return whether tensors have values, so that comparing them tells something; not in a plan."""
    return _has_values.get()


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Let nobody compare values of this thread's tensors inside, as these are never computed."""
    token = _has_values.set(False)
    try:
        yield
    finally:
        _has_values.reset(token)


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
