"""Where a rank's slices of buckets are kept: on the device, or on the host.

A `Home` hands out their memory. It keeps each tensor where it was made. A subclass may move *blocks* between memories:
a block is what one bucket keeps of one role, as one flat tensor. Buckets say when they use a block and when they have
done so; in between, such a home may have it in another memory, or on a disk.
"""

from __future__ import annotations

import contextlib
import enum
from typing import TYPE_CHECKING

import torch

from booster_runtime.collectives import Pending
from booster_runtime.memory import CopyStream, locked_buffer, zeros_in_pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from booster_core.errors import OffloadError


class Role(enum.Enum):
    """What a block holds of a bucket: this rank's slice of something."""

    PARAM = "param"
    """Working values."""
    GRAD = "grad"
    """Gradients."""
    OPTIM = "optim"
    """Masters and the optimizer's elementwise state, as bytes."""


Key = tuple[int, Role]
"""Names a block: a number that no other bucket has, and the role."""


class Home:
    """Keeps tensors where they were made.

    Attributes:
        moves: Whether a block may ever be moved. Where it may not, buckets don't announce their uses.
        pins: Whether copies of blocks on the host are page-locked, so that an accelerator makes them by itself.

    Collective: none of its methods; ranks need not do the same.
    """

    moves: bool = False
    pins: bool = True

    def __init__(self) -> None:
        self._problem: OffloadError | None = None
        self._copy_streams: dict[tuple[torch.device, bool], CopyStream] = {}

    def copy_stream(self, device: torch.device, *, up: bool) -> CopyStream:
        """Return the stream of all copies from the host to a device (``up``), or of all from it to the host.

        One for each: a device has few streams and keeps freed memory apart for each, and copies in one direction run
        one after the other anyway.
        """
        key = device, up
        if key not in self._copy_streams:
            self._copy_streams[key] = CopyStream(device)
        return self._copy_streams[key]

    def problem(self) -> OffloadError | None:
        """Return what has gone wrong since the last call, such as a full disk; it has done no harm to any values."""
        problem, self._problem = self._problem, None
        return problem

    # ---- blocks, for homes that move them

    def add(self, key: Key, flat: Tensor, rebind: Callable[[Tensor | None], None]) -> None:
        """Take over a block, which is not in use then.

        Args:
            key: Its name.
            flat: Its values, 1-D.
            rebind: Called, on the training thread within another method, with the memory in which the block is from
                then on, of the same length and format; with ``None`` when it is not in memory.
        """

    def drop(self, key: Key) -> None:
        """Forget a block altogether."""

    def fetch(self, key: Key) -> Pending:
        """Begin a use. After ``wait()`` the block stays where it can be computed with until `release`.

        Parameters and gradients are on the device then; optimizer state there or on the host. Uses are counted.
        """
        del key
        return Pending()

    def release(self, key: Key, *, changed: bool) -> None:
        """End a use.

        Args:
            key: The block.
            changed: Whether it has been written to.
        """

    def use_below(self, key: Key) -> Tensor | None:
        """Begin a use of a block on the host, where an accelerator computes and the block is offloaded.

        Returns:
            Its values on the host, 1-D, which may be written to until `release_below`; ``None`` where the block stays
            on the device, or is not on the host. Then no use has begun.
        """
        del key
        return None

    def release_below(self, key: Key) -> None:
        """End a use that `use_below` has begun: the next one finds what was written."""

    def lifting(self, key: Key) -> AbstractContextManager[None]:
        """Return a context for copies from the host into a block that is in use.

        They may be underway when it ends: the block's next use waits for them.
        """
        del key
        return contextlib.nullcontext()

    def forget(self, key: Key) -> None:
        """Discard a block's values: the next use begins without."""

    def reserve(self, num_bytes: int) -> None:
        """Count device memory that is taken for what is not a block."""

    def free(self, num_bytes: int) -> None:
        """Count reserved memory as given back."""

    def moment(self, name: str) -> None:
        """Note what the model is doing, such as a module's name; for messages and pictures."""

    def end_step(self) -> None:
        """Note that an optimizer step has ended."""


def zeros_in_memory(
    numel: int, dtype: torch.dtype, device: torch.device, compute: torch.device, *, is_kept: bool = True
) -> Tensor:
    """Return 1-D zeros; on the host page-locked where an accelerator computes, so that it copies them by itself.

    Args:
        numel: Number of elements.
        dtype: Their format.
        device: Where they are.
        compute: The device that they are copied from and to.
        is_kept: Whether they stay for long, and should take no more memory than they need.
    """
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    if compute.type != "cpu":
        num_bytes = numel * dtype.itemsize
        if is_kept and num_bytes:
            return locked_buffer(num_bytes)[:num_bytes].zero_().view(dtype)
        return torch.zeros(numel, dtype=dtype, pin_memory=True)
    return zeros_in_pages(numel, dtype)
