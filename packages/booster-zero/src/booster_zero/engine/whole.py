"""How long a bucket keeps its whole values, the states they go through, and memory for them that is used again.

New memory costs the CPU as much as a copy: each page of it is cleared on its first use. Whether a buffer is free is
told by its storage's reference count: autograd, or anybody else, may still hold views of it after its bucket was
released.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_OWN_REFERENCES = 2
"""The pool's tensor, and the storage object through which it asks."""

_LARGEST_FIT = 1.5
"""How many times as large as needed a buffer may be."""


class Keep(enum.Enum):
    """How long a rank keeps the whole values of a bucket."""

    ALWAYS = "always"
    """ZeRO stages 1 and 2: updates are gathered into the parameters after each step."""
    UNTIL_STEP = "until the step"
    """From the first use to the next step."""
    IN_USE = "while in use"
    """ZeRO stage 3: gathered before each use, released after it."""


class WholeState(enum.Enum):
    """What a rank has of a bucket's whole values."""

    SHARDED = "sharded"
    """Its own slice alone: parameters are absent."""
    ARRIVING = "arriving"
    """A buffer with all of them, here or on its way; parameters are absent."""
    GATHERED = "gathered"
    """All, to be used: parameters are views of it."""


TRANSITIONS: dict[WholeState, frozenset[WholeState]] = {
    WholeState.SHARDED: frozenset({WholeState.ARRIVING}),
    WholeState.ARRIVING: frozenset({WholeState.GATHERED, WholeState.SHARDED}),
    WholeState.GATHERED: frozenset({WholeState.ARRIVING, WholeState.SHARDED}),
}
"""Where each state may lead. A gather that failed leads back to the beginning."""


def check_transition(before: WholeState, after: WholeState) -> None:
    """Check that a bucket may go from one state to another.

    Raises:
        RuntimeError: If the table has no such transition, which is an error in this package.
    """
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(state.value for state in TRANSITIONS[before]))
        msg = f"A bucket that is {before.value} can't become {after.value}; it can become {allowed}."
        raise RuntimeError(msg)


class BufferPool:
    """Lends 1-D buffers.

    Args:
        least_bytes: What a buffer has at least on the CPU, so that those of buckets that are not quite full can take
            each other's place. What is not touched takes no memory.
        most_idle_bytes: Idle memory beyond this is given back to the system, the largest buffers first.
    """

    def __init__(self, least_bytes: int, most_idle_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._most_idle_bytes = most_idle_bytes
        self._idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer with arbitrary values, shape ``(numel,)``."""
        # What is allocated under inference mode could not be used in training later.
        with torch.inference_mode(mode=False):
            if device.type != "cpu":  # torch's allocators for accelerators keep memory themselves
                return torch.empty(numel, dtype=dtype, device=device)
            needed = numel * dtype.itemsize
            length = max(needed, self._least_bytes)
            fitting = [
                (buffer.numel(), position)
                for position, buffer in enumerate(self._idle)
                if length <= buffer.numel() <= _LARGEST_FIT * length and is_free(buffer)
            ]
            held = self._idle.pop(min(fitting)[1]) if fitting else torch.empty(length, dtype=torch.uint8)
            return held[:needed].view(dtype)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. Others may still read it; it is lent again when they don't."""
        if buffer.device.type != "cpu":
            return
        self._idle.append(torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()))
        while sum(idle.numel() for idle in self._idle) > self._most_idle_bytes:
            sizes = [idle.numel() for idle in self._idle]
            del self._idle[sizes.index(max(sizes))]

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        self._idle.clear()


def is_free(buffer: Tensor) -> bool:
    """Return whether a buffer's memory is referred to by this tensor alone."""
    storage = buffer.untyped_storage()
    # As torch's own CUDA graphs ask; there is no public name for it.
    return int(torch._C._storage_Use_Count(storage._cdata)) == _OWN_REFERENCES  # noqa: SLF001
