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
        self.follow()
        with self.inside():
            yield

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Run what the body starts after what the lane has been told to wait for alone, such as its own earlier work.

        Memory that the body allocates is used again by the lane, once it is freed.
        """
        if self._stream is None:
            yield
            return
        with self._stream:
            yield

    def follow(self) -> None:
        """Let what the lane starts later come after what has been started so far on the stream that computes."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def wait(self, event: torch.Event | None) -> None:
        """Let what the lane starts later come after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Return when everything started in the lane so far has ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> torch.Event | None:
        """Return an event that comes when everything started in the lane so far has ended."""
        return None if self._stream is None else self._stream.record_event()

    def uses(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from other uses, once nobody holds it, until the lane has come as far as now."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
