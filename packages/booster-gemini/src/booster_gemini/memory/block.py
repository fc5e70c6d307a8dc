"""What a memory knows of one buffer: where its bytes are, and on which way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

    from booster_gemini.memory.disk import Transfer
    from booster_gemini.memory.tiers import Tier
    from booster_zero.engine import FlatBuffer, Key


@dataclass(eq=False)
class Block:
    """One block, and on which of its ways it is.

    Attributes:
        owner: The buffer whose bytes they are.
        tier: The memory where it is used.
        buffer: Its bytes, where they are in a memory; still there while they are being written out.
        place: The memory that the buffer is in.
        offset: Its region on the disk, once it has one.
        is_saved: Whether the lower memory (host buffer or region) holds the present values.
        below: Its bytes on the host, for a block that is used on the device.
        staged: The same on their way between the device and the disk.
        coming: The read that fills the buffer, or the bytes on the host that it is copied from.
        going: The write that empties it.
        ready: The event after which the device's buffer can be used.
        copied: The event after which the host may read and write its bytes below.
        has_values: Whether there are any.
        users: How many uses are going on.
    """

    owner: FlatBuffer
    numel: int
    dtype: torch.dtype
    num_bytes: int
    tier: Tier
    buffer: Tensor | None = None
    offset: int | None = None
    below: Tensor | None = None
    staged: Tensor | None = None
    is_saved: bool = False
    coming: Transfer | None = None
    going: Transfer | None = None
    ready: torch.Event | None = None
    copied: torch.Event | None = None
    has_values: bool = True
    users: int = 0
    is_bound: bool = False
    last_use: int = field(default=0)

    @property
    def key(self) -> Key:
        """What policies know it by."""
        return self.owner.key

    @property
    def is_here(self) -> bool:
        """Whether the values are where they are used, or are on their way there."""
        return self.buffer is not None and self.going is None

    @property
    def flat(self) -> Tensor:
        """The values where they are used, in their format."""
        assert self.buffer is not None, "only what is here can be seen"
        return self.buffer[: self.num_bytes].view(self.dtype)

    @property
    def is_below(self) -> bool:
        """Whether the host has the present values, and nobody uses or moves those on the device."""
        return self.below is not None and self.is_saved and not self.users and self.coming is self.going is None

    def flat_below(self) -> Tensor:
        """Return the values on the host, in their format, once copies from and to there have ended."""
        assert self.below is not None, "only what is on the host can be seen there"
        if self.copied is not None:
            self.copied.synchronize()
        return self.below[: self.num_bytes].view(self.dtype)

    def place(self, lower: str) -> str:
        """Return where the values are, for pictures.

        Args:
            lower: The memory beneath that of the tier.
        """
        if self.going is not None:
            return "leaving"
        if self.coming is not None and not self.coming.is_done:
            return "coming"
        if self.buffer is not None:
            return self.tier.device.type
        if not self.has_values:
            return "nowhere"
        return lower if self.below is not None else "disk"


def bytes_by_place(blocks: Iterable[Block], tiers: Sequence[Tier], *, has_disk: bool) -> dict[str, int]:
    """Return how many bytes of blocks are where: by device type, and ``"disk"``.

    Args:
        blocks: All of them.
        tiers: The memories, the lowest last.
        has_disk: Whether a disk is used.
    """
    places = dict.fromkeys([*(tier.device.type for tier in tiers), *(["disk"] if has_disk else [])], 0)
    for block in blocks:
        if block.buffer is not None:
            places[block.tier.device.type] += block.num_bytes
        elif block.below is not None:
            places[tiers[-1].device.type] += block.num_bytes
        elif block.has_values:
            places["disk"] += block.num_bytes
    return places
