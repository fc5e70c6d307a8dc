"""What the ranks of a group tell each other about their memory, and in which order.

Each rank has a board of a few words for each operation that is underway: its number, where its tensors lie, and how far
this rank has come. Only its owner writes a board; the others read it. A number is compared for equality, so a word that
is read while it is being written is just not the expected one yet.

Board of one operation::

    word 0   number of the operation, once the table below can be read
    word 1   address of a table: where each tensor of the operation lies
    word 2   word 0 + word 1, against a reading between two writes
    word 3   bytes that the operation is about: the same on every rank, or the ranks call different things
    word 4   what is done to them, see `signatures`: the same on every rank, too
    word 5   number of the operation, once the first of two phases is over
    word 6   number of the operation, once this rank has read all that it needs; negative, once it has found an error
    word 7   address of a table: where the error's text lies, and its length

A table has two words for each tensor: where it begins, and its length in bytes. Words are written one after the other
and read by other processors in that order, which only some kinds of processors promise, see `memory.is_supported`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from booster_core.ranks import PROGRESS
from booster_runtime.collectives.direct import memory
from booster_runtime.collectives.direct.signatures import describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from booster_runtime.collectives.direct.operations import Operation

WORDS = 8
_NUMBER, _TABLE, _CHECK, _NBYTES, _SIGNATURE, _PHASE, _DONE, _ERROR = range(WORDS)
_WINDOW = 64
"""Operations that may be underway at once; one more waits for the oldest."""
_SPINS = 200
_LONGEST_PAUSE_SECONDS = 5e-4
_LONG_SECONDS = 1.0
_LONG_PAUSE_SECONDS = 2e-3
_HELP_SECONDS = 0.02
SCRATCH_BYTES = 1 << 19
"""Others' terms of a sum are read in blocks of this size, which stay in the cache."""


class PeerEndedError(RuntimeError):
    """A rank that something is needed of has ended."""


class MismatchError(RuntimeError):
    """Ranks take part in one collective with different operations, reductions, formats or lengths."""


class Peer:
    """Another rank of the group, as seen from here.

    Args:
        rank: Its index in the group.
        name: Its rank in the world.
        pid: Its process.
        board: Address of its board there.
    """

    def __init__(self, rank: int, name: int, pid: int, board: int) -> None:
        self.rank, self.name, self.pid, self._board = rank, name, pid, board
        self._words = (ctypes.c_int64 * WORDS)()
        self._address = ctypes.addressof(self._words)
        self._slot = memory.Window(pid, self._address, WORDS * 8)
        self._entry = memory.Window(pid, self._address, 16)

    def look(self, number: int) -> ctypes.Array[ctypes.c_int64]:
        """Return the words of an operation's board."""
        try:
            self._slot.read(self._board + (number % _WINDOW) * WORDS * 8)
        except OSError as error:
            raise self._ended(error) from error
        return self._words

    def entry(self, table: int, index: int) -> tuple[int, int]:
        """Return the address and the length in bytes that stand in a table there."""
        try:
            self._entry.read(table + 16 * index)
        except OSError as error:
            raise self._ended(error) from error
        return self._words[0], self._words[1]

    def text(self, table: int) -> str:
        """Return the text to which a table there points."""
        address, length = self.entry(table, 0)
        text = ctypes.create_string_buffer(length)
        self._copy(address, ctypes.addressof(text), length)
        return text.raw.decode(errors="replace")

    def read(self, source: int, target: Tensor) -> None:
        """Copy from an address there into a contiguous tensor."""
        if target.numel():
            self._copy(source, target.data_ptr(), target.numel() * target.element_size())

    def _copy(self, source: int, target: int, nbytes: int) -> None:
        try:
            memory.read(self.pid, source, target, nbytes)
        except OSError as error:
            raise self._ended(error) from error

    def _ended(self, error: OSError) -> PeerEndedError:
        return PeerEndedError(f"Rank {self.name} has ended, or its memory can't be read any more: {error}")


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
        self._underway: dict[int, Operation] = {}
        self._scratch: Tensor | None = None

    # ---- this rank's board

    def post(self, number: int, table: int, nbytes: int, signature: int) -> None:
        """Tell the others where this rank's tensors lie."""
        words = (number % _WINDOW) * WORDS
        self._board[words + _TABLE] = table
        self._board[words + _CHECK] = number + table
        self._board[words + _NBYTES] = nbytes
        self._board[words + _SIGNATURE] = signature
        self._board[words + _NUMBER] = number

    def post_phase(self, number: int) -> None:
        """Tell the others that the first phase is over here."""
        self._board[(number % _WINDOW) * WORDS + _PHASE] = number

    def post_done(self, number: int) -> None:
        """Tell the others that nothing of theirs is read any more."""
        self._board[(number % _WINDOW) * WORDS + _DONE] = number

    def fail(self, number: int, msg: str) -> NoReturn:
        """Raise an error here, and on each rank of the group that takes part in the operation.

        Raises:
            MismatchError: With that message.
        """
        text = msg.encode()
        table = (ctypes.c_int64 * 2)()
        buffer = ctypes.create_string_buffer(text, len(text))
        table[0], table[1] = ctypes.addressof(buffer), len(text)
        _boards.append((table, buffer))
        words = (number % _WINDOW) * WORDS
        self._board[words + _ERROR] = ctypes.addressof(table)
        self._board[words + _DONE] = -number
        raise MismatchError(msg)

    # ---- the others' boards

    def table_of(self, peer: Peer, number: int, nbytes: int, signature: int) -> int | None:
        """Return the address of a rank's table, or ``None`` where it has not come to the operation yet.

        Raises:
            MismatchError: If the rank takes part in another operation, or in the same with other tensors.
        """
        words = peer.look(number)
        if words[_NUMBER] != number or words[_CHECK] != number + words[_TABLE]:
            return None
        if words[_NBYTES] != nbytes or words[_SIGNATURE] != signature:
            theirs = describe(words[_SIGNATURE], words[_NBYTES])
            ours = describe(signature, nbytes)
            how = "with other splits of the same bytes" if theirs == ours else "or with different shapes"
            self.fail(
                number,
                f"Rank {peer.name} takes part in this collective by {theirs}, rank {self.name} by {ours}: the ranks "
                f"call different collectives, {how}.",
            )
        return words[_TABLE]

    def has_phase(self, peer: Peer, number: int) -> bool:
        """Whether a rank is over the first phase.

        Raises:
            MismatchError: If the rank has found an error.
        """
        words = peer.look(number)
        if words[_PHASE] == number:
            return True
        self._hear_error(peer, words, number)
        return False

    def is_done(self, peer: Peer, number: int) -> bool:
        """Whether a rank needs nothing of this one's any more, as one that has ended does not.

        Raises:
            MismatchError: If the rank has found an error.
        """
        try:
            words = peer.look(number)
            if words[_DONE] == number:
                return True
            self._hear_error(peer, words, number)
        except PeerEndedError:
            return True
        return False

    def _hear_error(self, peer: Peer, words: ctypes.Array[ctypes.c_int64], number: int) -> None:
        if words[_DONE] == -number:
            raise MismatchError(peer.text(words[_ERROR]))

    # ---- operations

    def start(self, operation: Operation) -> None:
        """Begin an operation; it goes on in `wait`, or by itself where nobody waits for it for a while.

        Collective: every rank of the group, in the same order.
        """
        with self._lock:
            oldest = self._underway.get(self._last + 1 - _WINDOW)
        if oldest is not None:
            self.wait(oldest)
        with self._lock:
            self._last += 1
            self._underway[self._last] = operation
            operation.begin(self, self._last)
        _HELPER.watch(self)

    def wait(self, operation: Operation) -> None:
        """Return once an operation has ended here and nobody reads its tensors any more.

        Raises:
            MismatchError: If ranks take part with different operations, reductions, formats or lengths.
            RuntimeError: If a rank has ended, or did not come within the time limit.
        """
        start = time.monotonic()
        spins = 0
        while not operation.has_ended:
            if self.advance():
                spins = 0
                continue
            if operation.has_ended:
                return
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            time.sleep(min(_LONGEST_PAUSE_SECONDS, 1e-5 * (spins - _SPINS + 1)))
            waited = time.monotonic() - start
            if waited > _LONG_SECONDS and threading.current_thread() is threading.main_thread():
                self._wait_long(operation, start + self._timeout_seconds)
                return
            if waited > self._timeout_seconds:
                self._give_up(operation)

    def _wait_long(self, operation: Operation, deadline: float) -> None:
        """Go on waiting, and let the monitor know that this is what the main thread does."""
        PROGRESS.is_waiting = True
        try:
            while not operation.has_ended:
                if not self.advance():
                    time.sleep(_LONG_PAUSE_SECONDS)
                if time.monotonic() > deadline and not operation.has_ended:
                    self._give_up(operation)
        finally:
            PROGRESS.is_waiting = False

    def _give_up(self, operation: Operation) -> NoReturn:
        msg = (
            f"timed out after {self._timeout_seconds:g} s waiting for rank(s) "
            f"{', '.join(map(str, operation.waits_for()))} of a group of {self.size} in {operation.describe()}"
        )
        raise RuntimeError(msg)

    def advance(self) -> bool:
        """Take every operation that is underway as far as it goes, and return whether any came further."""
        moved = False
        with self._lock:
            for number, operation in list(self._underway.items()):
                moved = operation.advance() or moved
                if operation.has_ended:
                    del self._underway[number]
        return moved

    def has_work(self) -> bool:
        """Whether an operation is underway."""
        return bool(self._underway)

    def scratch(self, nbytes: int) -> Tensor:
        """Return bytes to read into, which the next call may return again."""
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes]


class _Helper:
    """A thread that takes operations further whose rank does something else for a while.

    Without it, a rank that waits in another library's barrier could hold up one that waits for it here.
    """

    def __init__(self) -> None:
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._wanted = threading.Event()
        self._pid = 0

    def watch(self, channel: Channel) -> None:
        self._channels.add(channel)
        if self._pid != os.getpid():  # a forked process has no thread yet
            self._pid = os.getpid()
            self._wanted = threading.Event()
            threading.Thread(target=self._run, name="booster-direct-collectives", daemon=True).start()
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            time.sleep(_HELP_SECONDS)
            busy = [channel for channel in list(self._channels) if channel.has_work()]
            if not busy:
                self._wanted.clear()
            for channel in busy:
                try:
                    channel.advance()
                except RuntimeError:
                    self._channels.discard(channel)  # whoever waits for the operation meets the error, and raises it


_HELPER = _Helper()
_boards: list[Any] = []
"""The boards of all groups that there ever were: a rank that is a little later still looks at them."""
_state = {"is_enabled": True}
_channels: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def set_enabled(enabled: bool) -> None:  # noqa: FBT001 - the switch itself
    """Let groups that are made from now on use the direct way between ranks of one host, or not.

    Collective: none, but every rank must choose alike.
    """
    _state["is_enabled"] = enabled


def is_enabled() -> bool:
    """Return whether new groups use the direct way."""
    return _state["is_enabled"]


def channel_of(group: ProcessGroup | None) -> Channel | None:
    """Return the channel of a group whose ranks can all read each other's memory, else ``None`` on every rank.

    Collective: every rank of the group, when it is asked for first.
    """
    key = dist.group.WORLD if group is None else group
    assert key is not None, "a collective needs a process group"
    if key not in _channels:
        _channels[key] = _connect(key)
    return _channels[key]


def _connect(group: ProcessGroup) -> Channel | None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    board = (ctypes.c_int64 * (_WINDOW * WORDS))()
    secret = (ctypes.c_int64 * 1)(secrets.randbits(62))
    can = is_enabled() and memory.is_supported() and size > 1
    if can:
        memory.allow_readers()
    mine = (can, os.getpid(), ctypes.addressof(board), ctypes.addressof(secret), secret[0])
    facts: list[Any] = [None] * size
    dist.all_gather_object(facts, mine, group=group)
    names = dist.get_process_group_ranks(group)
    peers = [
        Peer(index, names[index], pid, address) for index, (_, pid, address, _, _) in enumerate(facts) if index != rank
    ]
    can = all(fact[0] for fact in facts) and all(_can_read(facts[peer.rank]) for peer in peers)
    answers: list[Any] = [None] * size
    # Also keeps every rank's secret alive until the others have read it.
    dist.all_gather_object(answers, can, group=group)
    if not all(answers):
        return None
    _boards.append(board)
    return Channel(rank, names[rank], peers, board, _timeout_of(group))


def _can_read(fact: tuple[bool, int, int, int, int]) -> bool:
    """Whether a rank's secret is found where it says it is: not so on another host, or in another container."""
    _, pid, _, address, secret = fact
    found = (ctypes.c_int64 * 1)()
    try:
        memory.read(pid, address, ctypes.addressof(found), 8)
    except OSError:
        return False
    return bool(found[0] == secret)


def _timeout_of(group: ProcessGroup) -> float:
    from booster_core.ranks import current_world

    try:
        backend: Any = group._get_backend(torch.device("cpu"))  # noqa: SLF001 - where torch keeps the time limit
        return float(backend.options._timeout.total_seconds())  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return current_world().timeout_seconds
