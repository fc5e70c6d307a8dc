"""A stream of copies and collectives in parallel to the one that computes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class CopyStream:
    """A stream of copies and collectives in parallel to the one that computes; nothing on the CPU, which has none.

    Args:
        device: The device whose memory is copied from and to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Run what the body starts after what has been started so far, and in parallel to what is started later."""
        self.wait_for_compute()
        with self.own_order():
            yield

    @contextlib.contextmanager
    def own_order(self) -> Iterator[None]:
        """Run what the body starts only after what this stream was told to wait for, such as its own earlier work.

        Memory that the body allocates is used again by this stream, once it is freed.
        """
        if self._stream is None:
            yield
            return
        # Another object for the same stream: torch 2.10 enters none that is entered already.
        ours = self._stream
        with torch.Stream(stream_id=ours.stream_id, device_index=ours.device_index, device_type=ours.device_type):
            yield

    def wait_for_compute(self) -> None:
        """Let what this stream starts later come after what has been started so far on the stream that computes."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def wait(self, event: torch.Event | None) -> None:
        """Let what this stream starts later come after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def synchronize(self) -> None:
        """Return when everything started in this stream so far has ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def record(self) -> torch.Event | None:
        """Return an event that comes when everything started in this stream so far has ended."""
        return None if self._stream is None else self._stream.record_event()
