"""Another rank of a group, whose memory this one reads: its board, its tables and its tensors.

Each rank has a board of eight words for each operation that is underway. Only its owner writes a board; the others read
it. A number is compared for equality, so a word that is read while it is written is just not the expected one yet.

Board of one operation::

    word 0   number of the operation, once the table below can be read
    word 1   address of a table: the address of each tensor of the operation
    word 2   word 0 + word 1, against a read between two writes
    word 3   bytes of the operation: the same on every rank, or the ranks call different collectives
    word 4   signature of the operation, see `signatures`: the same on every rank, too
    word 5   number of the operation, once the first of two phases is over
    word 6   number of the operation, once this rank has read all that it needs; negative after an error
    word 7   address of a table with the error's text and its length

A table has two words for each tensor: its address, and its length in bytes. Words are written one after the other,
without barriers, and other processors must see them in that order; see `memory.is_supported`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from booster_runtime.collectives.errors import PeerEndedError
from booster_runtime.collectives.transports.direct.memory import Window, read

if TYPE_CHECKING:
    from torch import Tensor

WORDS = 8
NUMBER, TABLE, CHECK, NBYTES, SIGNATURE, PHASE, DONE, ERROR = range(WORDS)
WINDOW = 64
"""Operations that may be underway at once; one more waits for the oldest."""


class Peer:
    """Another rank of the group.

    Args:
        rank: Its index in the group.
        name: Its rank in the world.
        pid: Its process.
        board: Address of its board in that process.
    """

    def __init__(self, rank: int, name: int, pid: int, board: int) -> None:
        self.rank, self.name, self.pid, self._board = rank, name, pid, board
        self._words = (ctypes.c_int64 * WORDS)()
        self._address = ctypes.addressof(self._words)
        self._slot = Window(pid, self._address, WORDS * 8)
        self._entry = Window(pid, self._address, 16)

    def look(self, number: int) -> ctypes.Array[ctypes.c_int64]:
        """Return the words of an operation's board."""
        try:
            self._slot.read(self._board + (number % WINDOW) * WORDS * 8)
        except OSError as error:
            raise self._ended(error) from error
        return self._words

    def entry(self, table: int, index: int) -> tuple[int, int]:
        """Return an entry of a table: address and length in bytes."""
        try:
            self._entry.read(table + 16 * index)
        except OSError as error:
            raise self._ended(error) from error
        return self._words[0], self._words[1]

    def text(self, table: int) -> str:
        """Return the text that a table points to."""
        address, length = self.entry(table, 0)
        text = ctypes.create_string_buffer(length)
        self._copy(address, ctypes.addressof(text), length)
        return text.raw.decode(errors="replace")

    def read(self, source: int, target: Tensor) -> None:
        """Copy from an address of the peer into a contiguous tensor."""
        if target.numel():
            self._copy(source, target.data_ptr(), target.numel() * target.element_size())

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        try:
            read(self.pid, source, target, nbytes)
        except OSError as error:
            raise self._ended(error) from error

    def _ended(self, error: OSError) -> PeerEndedError:
        return PeerEndedError(f"Rank {self.name} has ended, or its memory can't be read any more: {error}")
