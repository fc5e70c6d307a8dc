"""Saves of ranks on several hosts: each file is written by one rank, its owner, from front to back.

Two hosts that write into one page of a file damage it on NFS, in silence: each writes back the whole page as it knows
it. So files are spread over hosts and ranks, and the pieces of a file's tensors travel to its owner. The checksum is
computed from the values in memory as they are written, not read back.

Time runs in rounds. An owner's files are cut into windows of a third of a bucket; in round ``k`` every owner fills its
``k``-th window with its own pieces and those that the others send, and writes it. The other two thirds of the
bucket hold what is sent and what is received. In step ``s`` of a round each rank sends to the rank ``s`` before it and
receives from the rank ``s`` after it, so that ranks never wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from booster_checkpoint.files.checksums import BlockHasher
from booster_checkpoint.save.fragments import DeviceCopies, host_buffer
from booster_checkpoint.session import swap_bytes
from booster_core.state import as_bytes, box_numel, box_shape, full_box, intersect, regions_of, slices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from booster_checkpoint.files.checksums import Block
    from booster_checkpoint.files.tensor_file import TensorSpec
    from booster_checkpoint.save.fragments import Fragment, SnapshotBuffers
    from booster_checkpoint.save.plan import PlannedFile, Sums, WriteJob
    from booster_checkpoint.save.targets import Target
    from booster_core.ranks import Host
    from booster_core.state import Box, Region

_HOST = torch.device("cpu")
_ALIGNMENT = 16
"""Size of the widest element."""


class FileStream(Protocol):
    """A file that is written from front to back."""

    def write(self, values: memoryview) -> None:
        """Append bytes. The memory may change as soon as this returns."""

    def finish(self) -> None:
        """All of it has been written; on a disk, wait until it is there."""

    def abandon(self) -> None:
        """Let go of the file as it is."""


def write_by_owners(job: WriteJob, target: Target, buffers: SnapshotBuffers | None) -> Sums:
    """Let one rank write each file of tensors, whoever has its values; see `write_in_place` for what that returns.

    Args:
        job: What is written.
        target: Where the files go; prepared.
        buffers: Memory for a copy of fragments that do not stay until the end; ``None`` where they do.

    Collective: every rank.
    """
    session, call = job.session, job.call
    own_group = job.group or (session.cpu_group() if session.world_size > 1 else None)
    hosts, seeing = session.hosts(job.group), target.ranks_that_see(job)
    # Only ranks of rank 0's host where hosts have folders of their own: all files are in one place then.
    is_shared = len(seeing) == session.world_size
    owners = spread_over_hosts(hosts, [rank for rank in seeing if is_shared or hosts[rank] == hosts[0]])
    try:
        with session.together(f"{call} (list values)", target.path, for_long=True):
            fragments = job.fragments if buffers is None else buffers.take(job.fragments)
            if buffers is not None:
                buffers.wait()
            write = OwnerWrite(job, fragments, owners, functools.partial(target.open, job.plan))
        with session.together(f"{call} (write)", target.path, for_long=True, nbytes=job.plan.total_bytes):
            told = write.run(own_group)
    finally:
        if buffers is not None:
            buffers.release()
    return {name: each for sums in session.gather_to_first(told, job.group) for name, each in sums.items()}


def spread_over_hosts(hosts: Sequence[Host], ranks: Iterable[int]) -> list[int]:
    """Return ranks in an order in which the first of each host comes before the second of any."""
    numbers = dict[Any, int]()
    place = {}
    for rank in ranks:
        place[rank] = numbers.get(hosts[rank], 0)
        numbers[hosts[rank]] = place[rank] + 1
    return sorted(place, key=place.__getitem__)


@dataclass(frozen=True)
class _Cut:
    """A range of a tensor's values in a window.

    Args:
        file: Position of the file in the plan.
        spec: The tensor.
        start: First element of the flattened tensor.
        stop: One past the last.
        begin: Where the values begin in the window, in bytes.
    """

    file: int
    spec: TensorSpec
    start: int
    stop: int
    begin: int


def _windows(files: Iterable[tuple[int, PlannedFile]], window_bytes: int) -> Iterator[list[_Cut]]:
    """Cut the values of files into windows; none spans two files."""
    for index, file in files:
        window, used = list[_Cut](), 0
        for spec in file.specs:
            start, numel = 0, spec.nbytes // spec.dtype.itemsize
            while start < numel:
                used += -used % spec.dtype.itemsize
                room = (window_bytes - used) // spec.dtype.itemsize
                if room <= 0:
                    yield window
                    window, used = [], 0
                    continue
                stop = min(start + room, numel)
                window.append(_Cut(index, spec, start, stop, used))
                used += (stop - start) * spec.dtype.itemsize
                start = stop
        if window:
            yield window


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one rank holds of a tensor, with its values where that is this rank."""

    box: Box
    flat: tuple[int, int]
    data: Tensor | None = None


_Held = dict[tuple[int, str], list[_Piece]]
"""The pieces that one rank has for one owner, by file and tensor."""


@dataclass(frozen=True, eq=False)
class _Share:
    """A box that a window takes from a piece.

    Args:
        cut: The range of the window.
        target: The region of that range which contains the box.
        piece: The piece.
        source: The region of the piece which contains the box.
        box: The index range of the whole tensor.
        begin: Where its values begin among all that the window takes from the same rank, in bytes.
    """

    cut: _Cut
    target: Region
    piece: _Piece
    source: Region
    box: Box
    begin: int

    @property
    def nbytes(self) -> int:
        """Size of the values."""
        return box_numel(self.box) * self.cut.spec.dtype.itemsize

    def in_piece(self) -> Tensor:
        """Return the values where they are held."""
        data = self.piece.data
        assert data is not None, "of this rank"
        shape = box_shape(self.source.box)
        if tuple(data.shape) != shape:  # a flat range
            flat = data.reshape(-1)
            data = flat[self.source.start : self.source.start + self.source.numel].view(shape)
        return data[slices_of(self.box, self.source.box)]

    def in_message(self, message: Tensor) -> Tensor:
        """Return their place among what travels from one rank to the other."""
        values = message[self.begin : self.begin + self.nbytes].view(self.cut.spec.dtype)
        return values.view(box_shape(self.box))

    def in_window(self, window: Tensor) -> Tensor:
        """Return their place in the window."""
        dtype = self.cut.spec.dtype
        first = self.cut.begin + self.target.start * dtype.itemsize
        values = window[first : first + self.target.numel * dtype.itemsize].view(dtype)
        return values.view(box_shape(self.target.box))[slices_of(self.box, self.target.box)]


def _shares(window: Iterable[_Cut], held: _Held) -> list[_Share]:
    """Return the boxes that a window takes from a rank's pieces; owner and sender compute the same list."""
    shares, used = list[_Share](), 0
    for cut in window:
        pieces = held.get((cut.file, cut.spec.key), ())
        targets = regions_of(full_box(cut.spec.shape), (cut.start, cut.stop)) if pieces else []
        for piece in pieces:
            for source in regions_of(piece.box, piece.flat):
                for target in targets:
                    common = intersect(target.box, source.box)
                    if common is not None:
                        used += -used % cut.spec.dtype.itemsize
                        shares.append(_Share(cut, target, piece, source, common, used))
                        used += shares[-1].nbytes
    return shares


class OwnerWrite:
    """The part of one rank in a save by owners. Making it involves no other rank.

    Args:
        job: What is written. Owners create their files.
        fragments: What this rank holds; all of them are kept, and read when their window's turn comes.
        owners: The ranks that write, in the order in which files are given to them.
        open_file: Opens a file of this rank's, given its name and size.
    """

    def __init__(
        self,
        job: WriteJob,
        fragments: Iterable[Fragment],
        owners: Sequence[int],
        open_file: Callable[[str, int], FileStream],
    ) -> None:
        plan, rank, world_size = job.plan, job.session.rank, job.session.world_size
        self._plan = plan
        self._open_file = open_file
        self._owners = owners
        self._rank = rank
        # Where each step of a round sends to, and receives from.
        self._partners = [((rank - step) % world_size, (rank + step) % world_size) for step in range(1, world_size)]
        self._want_checksums = job.checksums
        self._held: dict[int, _Held] = {owner: {} for owner in owners}
        for fragment in fragments:
            index = plan.homes[fragment.part][fragment.key]
            pieces = self._held[self._owner_of(index)].setdefault((index, fragment.key), [])
            pieces.append(_Piece(fragment.box, fragment.flat, fragment.data))
        window_bytes = max(job.bucket_bytes // 3 // _ALIGNMENT, 1) * _ALIGNMENT
        mine = (each.data for held in self._held.values() for found in held.values() for each in found)
        device = next((data.device for data in mine if data is not None and data.device.type != "cpu"), _HOST)
        self._filled, self._outgoing, self._incoming = (host_buffer(window_bytes, device) for _ in range(3))
        self._copies = DeviceCopies()
        self._failure: Exception | None = None
        self._stream: _Stream | None = None
        self._told: dict[str, tuple[int, tuple[Block, ...]]] = {}

    def run(self, group: ProcessGroup | None) -> dict[str, tuple[int, tuple[Block, ...]]]:
        """Send this rank's pieces to the owners of their files, and write the files that this rank owns.

        A failure to read or write does not stop what other ranks wait for; it is raised at the end.

        Args:
            group: A group of all ranks with a CPU backend, used for nothing else meanwhile; ``None`` for one rank.

        Returns:
            For each file of this rank its size, and its blocks.

        Collective: every rank.
        """
        try:
            theirs = self._exchange_tables(group)
            turns = {owner: _windows(self._files_of(owner), self._filled.numel()) for owner in self._owners}
            while windows := {owner: window for owner, turn in turns.items() if (window := next(turn, None))}:
                self._run_round(windows, theirs, group)
            with self._noting_failure():
                self._finish_files()
            if self._failure is not None:
                raise self._failure
        finally:
            if self._stream is not None:
                self._stream.abandon()
        return self._told

    def _owner_of(self, index: int) -> int:
        return self._owners[index % len(self._owners)]

    def _files_of(self, owner: int) -> list[tuple[int, PlannedFile]]:
        return [(index, file) for index, file in enumerate(self._plan.files) if self._owner_of(index) == owner]

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Run the body unless something has failed before, and keep its error."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - other ranks are waiting for what comes next
            self._failure = self._failure or error

    def _exchange_tables(self, group: ProcessGroup | None) -> dict[int, _Held]:
        """Tell each owner what this rank holds for it; return what the others hold for this one."""
        theirs: dict[int, _Held] = {}
        for to, source in self._partners:
            content = None
            if to in self._held:
                listed = [
                    [*place, [[piece.box, piece.flat] for piece in pieces]] for place, pieces in self._held[to].items()
                ]
                content = json.dumps(listed).encode()
            receives = self._rank in self._held
            received = swap_bytes(content, to, source if receives else None, group)
            if receives:
                theirs[source] = {
                    (file, key): [_Piece(tuple((a, b) for a, b in box), (flat[0], flat[1])) for box, flat in pieces]
                    for file, key, pieces in json.loads(received)
                }
        return theirs

    def _run_round(
        self, windows: Mapping[int, list[_Cut]], theirs: Mapping[int, _Held], group: ProcessGroup | None
    ) -> None:
        """Fill and write this rank's window, and send what belongs into those of others."""
        mine = windows.get(self._rank, [])
        with self._noting_failure():
            for share in _shares(mine, self._held.get(self._rank, {})):
                self._copy(share.in_piece(), share.in_window(self._filled))
        for to, source in self._partners:
            outgoing = _shares(windows.get(to, ()), self._held.get(to, {}))
            sending = None
            if outgoing:
                with self._noting_failure():
                    for share in outgoing:
                        self._copy(share.in_piece(), share.in_message(self._outgoing))
                    self._copies.wait()
                sending = dist.isend(self._outgoing[: outgoing[-1].begin + outgoing[-1].nbytes], dst=to, group=group)
            incoming = _shares(mine, theirs.get(source, {}))
            if incoming:
                dist.recv(self._incoming[: incoming[-1].begin + incoming[-1].nbytes], src=source, group=group)
                for share in incoming:
                    share.in_window(self._filled).copy_(share.in_message(self._incoming))
            if sending is not None:
                sending.wait()
        with self._noting_failure():
            self._copies.wait()
            for cut in mine if self._failure is None else ():
                self._write(cut)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self._copies.note(source)

    def _write(self, cut: _Cut) -> None:
        file = self._plan.files[cut.file]
        if self._stream is None or self._stream.file is not file:
            self._finish_files(up_to=cut.file)
            self._stream = self._open(file)
        nbytes = (cut.stop - cut.start) * cut.spec.dtype.itemsize
        self._stream.write(cut, as_bytes(self._filled[cut.begin : cut.begin + nbytes]))

    def _finish_files(self, up_to: int | None = None) -> None:
        """End the file that is being written, and write those before another one that hold no values."""
        if self._failure is not None:
            return
        if self._stream is not None:
            self._told[self._stream.file.name] = self._stream.close()
            self._stream = None
        for index, file in self._files_of(self._rank) if self._rank in self._held else ():
            if file.name not in self._told and (up_to is None or index < up_to):
                self._told[file.name] = self._open(file).close()

    def _open(self, file: PlannedFile) -> _Stream:
        return _Stream(file, self._open_file, want_checksum=self._want_checksums)


class _Stream:
    """What one rank writes of a file from front to back: its frame, and the values between the frame's pieces.

    Args:
        file: What it holds.
        open_file: Opens the file, given its name and size.
        want_checksum: Compute the checksums of its blocks on the way.
    """

    def __init__(self, file: PlannedFile, open_file: Callable[[str, int], FileStream], *, want_checksum: bool) -> None:
        self.file = file
        self._frame = file.frame()
        self._rest = list(reversed(self._frame.pieces))
        self._stream = open_file(file.name, self._frame.nbytes)
        sizes = file.block_sizes(self._frame.nbytes) if want_checksum else []
        self._hasher = BlockHasher(sizes) if want_checksum else None
        self._position = 0

    def write(self, cut: _Cut, values: memoryview) -> None:
        """Write a range of a tensor's values, after those of all tensors before it in the file."""
        offset = self._frame.offsets[cut.spec.key] + cut.start * cut.spec.dtype.itemsize
        self._write_pieces(offset)
        assert offset == self._position, "values are in the order of the file"
        self._append(values)

    def close(self) -> tuple[int, tuple[Block, ...]]:
        """Write the rest; return the file's size and blocks. The end of an upload is not waited for."""
        self._write_pieces(self._frame.nbytes)
        self._stream.finish()
        return self._position, () if self._hasher is None else tuple(self._hasher.blocks)

    def abandon(self) -> None:
        """Close the file as it is."""
        self._stream.abandon()

    def _write_pieces(self, end: int) -> None:
        """Write the pieces of the frame that begin before an offset."""
        while self._rest and self._rest[-1][0] < end:
            self._append(memoryview(self._rest.pop()[1]))

    def _append(self, content: memoryview) -> None:
        self._stream.write(content)
        if self._hasher is not None:
            self._hasher.update(content)
        self._position += len(content)
