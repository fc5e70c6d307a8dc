"""Copies between a device and its host that overlap with computation: one stream for each direction.

Memory of the device is allocated in the stream that fills it. So what one block leaves is filled for the
next as soon as it has been copied away, and what is computed waits for neither, but for the arrival of what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_runtime.memory import CopyStream
from booster_zero.engine import is_free

if TYPE_CHECKING:
    from torch import Tensor


class HostCopies:
    """Copies blocks up to a device and down to its host. The host waits for none of it.

    Args:
        device: The device.

    Attributes:
        up: Fills the device's buffers, which are allocated in it.
        down: Empties them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.up = CopyStream(device)
        self.down = CopyStream(device)

    def bring(self, target: Tensor, source: Tensor | None) -> torch.Event | None:
        """Start filling a buffer of the device.

        Args:
            target: The buffer, allocated in ``up``.
            source: What is copied into it, which stays as it is until then; ``None`` for nothing.

        Returns:
            An event after which the buffer can be read and written; whoever does so lets his stream wait for it.
        """
        if source is not None:
            with self.up.own_order():
                target.copy_(source, non_blocking=True)
        return self.up.record()

    def send(self, target: Tensor, source: Tensor, ready: torch.Event | None) -> torch.Event | None:
        """Start copying a buffer of the device to the host, after what has been computed so far.

        Args:
            target: Memory of the host.
            source: The buffer. Its memory is filled again only after the copy.
            ready: What `bring` returned for it, if nobody has waited for it.

        Returns:
            An event after which the host can read the copy.
        """
        self.down.wait(ready)
        with self.down.after_compute():
            target.copy_(source, non_blocking=True)
            sent = self.down.record()
        self.up.wait(sent)
        return sent

    def leave(self, buffer: Tensor) -> None:
        """Let a buffer be freed, of which everything that has been started so far may read."""
        self.up.wait_for_compute()
        if not is_free(buffer):  # others have views of it, and free it later than this
            buffer.record_stream(torch.accelerator.current_stream(self._device))

    def synchronize(self) -> None:
        """Return once nothing is copied any more."""
        self.up.synchronize()
        self.down.synchronize()
