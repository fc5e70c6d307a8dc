"""The operations that a group of ranks has underway, and this rank's board, by which the others follow them."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from booster_core.ranks import PROGRESS
from booster_runtime.collectives.errors import MismatchError, PeerEndedError
from booster_runtime.collectives.transports.direct.helper import HELPER
from booster_runtime.collectives.transports.direct.peer import (
    CHECK,
    DONE,
    ERROR,
    NBYTES,
    NUMBER,
    PHASE,
    SIGNATURE,
    TABLE,
    WINDOW,
    WORDS,
    Peer,
)
from booster_runtime.collectives.transports.direct.signatures import describe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from torch import Tensor

    class Underway(Protocol):
        """One collective, as `operations` implement it."""

        has_ended: bool

        def begin(self, channel: Channel, number: int) -> None:
            """Post this rank's tensors."""

        def advance(self) -> bool:
            """Take the steps that are possible now, and return whether there was one."""

        def waits_for(self) -> list[int]:
            """Return the ranks of the world that it waits for now."""

        def describe(self) -> str:
            """Return what it is, for messages."""


_YIELDS = 5
_FIRST_PAUSE_SECONDS = 5e-6
_LONGEST_PAUSE_SECONDS = 5e-4
_LONG_SECONDS = 1.0
_LONG_PAUSE_SECONDS = 2e-3
SCRATCH_BYTES = 1 << 19
"""Others' terms of a sum are read in blocks of this size, which stay in the cache."""

_kept: list[Any] = []
"""Texts of errors: a rank that is late still reads them."""


class Channel:
    """The operations of one group of ranks that can read each other's memory.

    Args:
        rank: This rank's index in the group.
        name: This rank's rank in the world.
        peers: The other ranks.
        board: This rank's board.
        timeout_seconds: How long to wait for a rank that does not come.
    """

    def __init__(self, rank: int, name: int, peers: Sequence[Peer], board: Any, timeout_seconds: float) -> None:
        self.rank, self.name = rank, name
        self.peers = list(peers)
        self.size = len(peers) + 1
        self._board = board
        self._timeout_seconds = timeout_seconds
        self._lock = threading.RLock()
        self._last = 0
        self._underway: dict[int, Underway] = {}
        self._scratch: Tensor | None = None

    # ---- this rank's board

    def post(self, number: int, table: int, nbytes: int, signature: int) -> None:
        """Tell the others the addresses of this rank's tensors."""
        words = (number % WINDOW) * WORDS
        self._board[words + TABLE] = table
        self._board[words + CHECK] = number + table
        self._board[words + NBYTES] = nbytes
        self._board[words + SIGNATURE] = signature
        self._board[words + NUMBER] = number

    def post_phase(self, number: int) -> None:
        """Tell the others that the first phase is over here."""
        self._board[(number % WINDOW) * WORDS + PHASE] = number

    def post_done(self, number: int) -> None:
        """Tell the others that this rank has read all that it needs."""
        self._board[(number % WINDOW) * WORDS + DONE] = number

    def fail(self, number: int, msg: str) -> NoReturn:
        """Raise an error here, and post it so that every rank of the group raises it.

        Raises:
            MismatchError: With that message.
        """
        text = msg.encode()
        table = (ctypes.c_int64 * 2)()
        buffer = ctypes.create_string_buffer(text, len(text))
        table[0], table[1] = ctypes.addressof(buffer), len(text)
        _kept.append((table, buffer))
        words = (number % WINDOW) * WORDS
        self._board[words + ERROR] = ctypes.addressof(table)
        self._board[words + DONE] = -number
        raise MismatchError(msg)

    # ---- the others' boards

    def table_of(self, peer: Peer, number: int, nbytes: int, signature: int) -> int | None:
        """Return the address of a rank's table, or ``None`` if it has not reached the operation yet.

        Raises:
            MismatchError: If the rank calls another operation, or the same with other tensors.
        """
        words = peer.look(number)
        if words[NUMBER] != number or words[CHECK] != number + words[TABLE]:
            return None
        if words[NBYTES] != nbytes or words[SIGNATURE] != signature:
            theirs = describe(words[SIGNATURE], words[NBYTES])
            ours = describe(signature, nbytes)
            how = "with other splits of the same bytes" if theirs == ours else "or with different shapes"
            self.fail(
                number,
                f"Rank {peer.name} takes part in this collective by {theirs}, rank {self.name} by {ours}: the ranks "
                f"call different collectives, {how}. Run with BOOSTER_DEBUG=collectives to see where each rank calls.",
            )
        return words[TABLE]

    def has_phase(self, peer: Peer, number: int) -> bool:
        """Return whether a rank has completed the first phase.

        Raises:
            MismatchError: If the rank has found an error.
        """
        words = peer.look(number)
        if words[PHASE] == number:
            return True
        self._hear_error(peer, words, number)
        return False

    def is_done(self, peer: Peer, number: int) -> bool:
        """Return whether a rank has read all that it needs of this one; a rank that has ended needs nothing.

        Raises:
            MismatchError: If the rank has found an error.
        """
        try:
            words = peer.look(number)
            if words[DONE] == number:
                return True
            self._hear_error(peer, words, number)
        except PeerEndedError:
            return True
        return False

    def _hear_error(self, peer: Peer, words: ctypes.Array[ctypes.c_int64], number: int) -> None:
        if words[DONE] == -number:
            raise MismatchError(peer.text(words[ERROR]))

    # ---- operations

    def start(self, operation: Underway) -> None:
        """Begin an operation. It advances in `wait`, and on the helper's thread while nobody waits.

        Collective: every rank of the group, in the same order.
        """
        with self._lock:
            oldest = self._underway.get(self._last + 1 - WINDOW)
        if oldest is not None:
            self.wait(oldest)
        with self._lock:
            self._last += 1
            self._underway[self._last] = operation
            operation.begin(self, self._last)
        HELPER.watch(self)

    def wait(self, operation: Underway) -> None:
        """Return once an operation has ended here and no rank reads its tensors any more.

        Raises:
            MismatchError: If ranks call different operations, or use different reductions, dtypes or lengths.
            RuntimeError: If a rank has ended, or did not reach the operation within the time limit.
        """
        start = time.monotonic()
        looks = 0
        while not operation.has_ended:
            if self.advance():
                looks = 0
                continue
            if operation.has_ended:
                return
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
                continue
            # Where ranks outnumber free cores, each yield may cost a time slice, but a sleeper is woken at once.
            time.sleep(min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * (looks - _YIELDS + 1)))
            waited = time.monotonic() - start
            if waited > _LONG_SECONDS and threading.current_thread() is threading.main_thread():
                self._wait_long(operation, start + self._timeout_seconds)
                return
            if waited > self._timeout_seconds:
                self._give_up(operation)

    def _wait_long(self, operation: Underway, deadline: float) -> None:
        """Wait less often, and let the monitor know that the main thread is waiting."""
        PROGRESS.is_waiting = True
        try:
            while not operation.has_ended:
                if not self.advance():
                    time.sleep(_LONG_PAUSE_SECONDS)
                if time.monotonic() > deadline and not operation.has_ended:
                    self._give_up(operation)
        finally:
            PROGRESS.is_waiting = False

    def _give_up(self, operation: Underway) -> NoReturn:
        msg = (
            f"timed out after {self._timeout_seconds:g} s waiting for rank(s) "
            f"{', '.join(map(str, operation.waits_for()))} of a group of {self.size} in {operation.describe()}"
        )
        raise RuntimeError(msg)

    def advance(self) -> bool:
        """Advance every operation that is underway, without waiting, and return whether any could."""
        moved = False
        with self._lock:
            for number, operation in list(self._underway.items()):
                moved = operation.advance() or moved
                if operation.has_ended:
                    del self._underway[number]
        return moved

    def has_work(self) -> bool:
        """Return whether an operation is underway."""
        return bool(self._underway)

    def scratch(self, nbytes: int) -> Tensor:
        """Return memory to read into; the next call may return the same."""
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes]
