"""A stream of copies and collectives in parallel to the one that computes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Lane:
    """A stream of copies and collectives in parallel to the one that computes; nothing on the CPU, which has none.

    Args:
        device: The device whose memory is copied from and to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run what the body starts after what has been started so far, and in parallel to what is started later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def mark(self) -> torch.Event | None:
        """Return an event that comes when everything started in the lane so far has ended."""
        return None if self._stream is None else self._stream.record_event()

    def uses(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from other uses, once nobody holds it, until the lane has come as far as now."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
