"""Whether the ranks of a group can read each other's memory: each offers a secret, and the others try to read it."""

from __future__ import annotations

import ctypes
import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from booster_runtime.collectives.transports.direct.channel import Channel
from booster_runtime.collectives.transports.direct.memory import allow_readers, is_supported, read
from booster_runtime.collectives.transports.direct.peer import WINDOW, WORDS, Peer
from booster_runtime.collectives.transports.time_limit import timeout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from booster_runtime.collectives.transports.protocol import Transport


@dataclass
class Offer:
    """What a rank tells the others so that they can try to read its memory; only addresses and numbers travel.

    Args:
        pid: Its process.
        board: Address of the board that it would use.
        secret_address: Address of the secret.
        secret: What must be found there.
        memory: Keeps board and secret alive; ``None`` on other ranks.
    """

    pid: int
    board: int
    secret_address: int
    secret: int
    memory: Any = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Offer, (self.pid, self.board, self.secret_address, self.secret)


_kept: list[Any] = []
"""Boards of all groups: a rank that is late still reads them."""


def make_offer() -> Offer | None:
    """Return what the other ranks of a group need to read this rank's memory; ``None`` if that is not supported.

    Collective: none.
    """
    if not is_supported():
        return None
    allow_readers()
    board = (ctypes.c_int64 * (WINDOW * WORDS))()
    secret = (ctypes.c_int64 * 1)(secrets.randbits(62))
    return Offer(os.getpid(), ctypes.addressof(board), ctypes.addressof(secret), secret[0], (board, secret))


def connect(
    group: ProcessGroup, portable: Transport, own: Offer | None, offers: Sequence[Offer | None]
) -> tuple[Channel | None, str]:
    """Return a channel if every rank can read every other's memory, else ``None`` and the reason, on every rank.

    Args:
        group: The group.
        portable: Its portable transport, over which the ranks agree.
        own: What this rank offered.
        offers: What every rank offered, in rank order.

    Collective: every rank of the group.
    """
    rank, names = dist.get_rank(group), dist.get_process_group_ranks(group)
    lacking = [name for name, offer in zip(names, offers, strict=True) if offer is None]
    if lacking or own is None:
        return None, f"ranks {lacking} do not run on x86-64 Linux"
    unreadable = [
        names[index]
        for index, offer in enumerate(offers)
        if offer is not None and index != rank and not _can_read(offer)
    ]
    # This exchange also keeps every rank's secret until the others have read it.
    for name, found in zip(names, portable.all_gather_object(unreadable), strict=True):
        if found:
            return None, f"rank {name} can't read the memory of ranks {found} (other hosts, containers or users)"
    _kept.append(own.memory)
    peers = [
        Peer(index, names[index], offer.pid, offer.board)
        for index, offer in enumerate(offers)
        if offer is not None and index != rank
    ]
    return Channel(rank, names[rank], peers, own.memory[0], timeout_of(group)), ""


def _can_read(offer: Offer) -> bool:
    """Return whether a rank's secret is at its address: not so on another host, or in another container."""
    found = (ctypes.c_int64 * 1)()
    try:
        read(offer.pid, offer.secret_address, ctypes.addressof(found), 8)
    except OSError:
        return False
    return bool(found[0] == offer.secret)
