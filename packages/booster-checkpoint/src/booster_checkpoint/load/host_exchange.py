"""Loads from URLs: ranks of one host that fill the same tensors fetch each of them once, and pass it on.

An object store takes longer to deliver a byte than ranks of one host to hand it to each other, and charges for each
request. So such ranks deal out what they fill, each fetches its part, and in rounds each sends the others what it has
filled last, while more is on its way; shards are filled in the order of their places in the files, so that what they
need is read ahead. Local files are read by every rank: ranks of a host share a page cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_checkpoint.save.fragments import DeviceCopies
from booster_checkpoint.storage.stored_file import ReadAhead, StoredFile
from booster_core.ranks import digest
from booster_core.state import regions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from booster_checkpoint.load.fill import Fill, ShardReader
    from booster_checkpoint.load.source import Source
    from booster_core.ranks import Host
    from booster_core.state import TensorShard

_Window = list[tuple["TensorShard", int]]
"""Shards that travel together, and where the values of each begin in the message, in bytes."""
_ALIGNMENT = 16
"""Size of the widest element."""
_ALONE = ""
"""The kind of shards that are never passed on: their values are not next to each other in memory."""


def digests_of(
    shards: Iterable[TensorShard], homes: Mapping[str, str], kinds: dict[str, list[TensorShard]]
) -> dict[str, str]:
    """Sort shards by kind, and return a digest of each kind that can be passed on.

    Digests are equal where ranks fill the same tensors in the same order. Kinds keep apart what ranks hold alike, as
    the working values of ZeRO, from what each holds a part of, as its masters.

    Args:
        shards: What this rank fills.
        homes: For each shard, by its key, the name of the tensor that it is filled from.
        kinds: Filled with the shards of each kind.
    """
    for shard in shards:
        kind = f"{'box' if shard.flat is None else 'flat'} {shard.dtype}" if shard.data.is_contiguous() else _ALONE
        kinds.setdefault(kind, []).append(shard)
    return {kind: digest_of(of_kind, homes) for kind, of_kind in kinds.items() if kind != _ALONE}


def digest_of(shards: Iterable[TensorShard], homes: Mapping[str, str]) -> str:
    """Return a digest of which parts of which tensors shards are filled from, in their order."""
    listed = [(shard.key, homes[shard.key], shard.global_shape, shard.box, shard.flat) for shard in shards]
    return digest(repr(listed)).hex()


def mates_by_kind(digests: Sequence[Mapping[str, str]], hosts: Sequence[Host]) -> list[dict[str, list[int]]]:
    """Return, for every rank and each of its kinds, the ranks of its host that fill the same shards; it is one of them.

    Args:
        digests: Every rank's.
        hosts: Every rank's.
    """
    mates: dict[tuple[Host, str, str], list[int]] = {}
    found = []
    for rank, of_rank in enumerate(digests):
        by_kind = {}
        for kind, of_kind in of_rank.items():
            by_kind[kind] = mates.setdefault((hosts[rank], kind, of_kind), [])
            by_kind[kind].append(rank)
        found.append(by_kind)
    return found


class Exchange:
    """Fills shards that several ranks of a host fill alike. Making it involves no other rank.

    Args:
        fill: What is loaded.
        shards: The shards, the same on each of the ranks.
        ranks: The ranks.
    """

    def __init__(self, fill: Fill, shards: Iterable[TensorShard], ranks: Sequence[int]) -> None:
        self._fill = fill
        self._ranks = ranks
        self._place = ranks.index(fill.session.rank)
        self._failure: Exception | None = None
        # A quarter of the bucket for what is sent, one for what is received, half for what is fetched.
        window_bytes = fill.bucket_bytes // 4
        pieces = (piece for shard in shards for piece in fill.cut(shard, window_bytes))
        located = locate(fill.source, pieces, fill.stored)
        parts: list[list[Located]] = [[] for _ in ranks]
        total, before = sum(fill.stored_bytes(each.shard) for each in located), 0
        for each in located:
            parts[before * len(ranks) // total].append(each)
            before += fill.stored_bytes(each.shard)
        self._part = parts[self._place]
        self._windows = [list(_windows((each.shard for each in part), window_bytes)) for part in parts]
        largest = max(_size(window) for windows in self._windows for window in windows)
        self._outgoing, self._incoming = (torch.empty(largest, dtype=torch.uint8) for _ in range(2))

    def run(self, group: ProcessGroup | None) -> Exception | None:
        """Fill this rank's part, and exchange the parts.

        Args:
            group: A group of all ranks with a CPU backend, used for nothing else meanwhile.

        Returns:
            What went wrong on this rank; the other ranks have not waited for it.

        Collective: the ranks that fill these shards.
        """
        count = len(self._ranks)
        # In step `s` each sends to the rank `s` before it and receives from the rank `s` after it: never in a circle.
        partners = [((self._place - step) % count, (self._place + step) % count) for step in range(1, count)]
        most_bytes = self._fill.bucket_bytes // 2
        read_ahead(self._part, most_bytes)
        with self._fill.reader(most_bytes) as reader:
            for number in range(max(map(len, self._windows))):
                mine = self._window(self._place, number)
                self._read(mine, reader)
                for to, source in partners:
                    sent = self._outgoing[: _size(mine)]
                    sending = dist.isend(sent, dst=self._ranks[to], group=group) if mine else None
                    if theirs := self._window(source, number):
                        dist.recv(self._incoming[: _size(theirs)], src=self._ranks[source], group=group)
                        self._take(theirs)
                    if sending is not None:
                        sending.wait()
        return self._failure

    def _window(self, place: int, number: int) -> _Window:
        windows = self._windows[place]
        return windows[number] if number < len(windows) else []

    def _read(self, window: _Window, reader: ShardReader) -> None:
        """Fill shards, and pack their values to be sent."""
        if self._failure is not None:
            return
        try:
            copies = DeviceCopies()
            for shard, begin in window:
                reader.fill(shard, self._fill.homes[shard.key])
                _packed(shard, begin, self._outgoing).copy_(shard.data.detach().view(-1), non_blocking=True)
                copies.note(shard.data)
            copies.wait()
        except Exception as error:  # noqa: BLE001 - other ranks are waiting for what comes next
            self._failure = error

    def _take(self, window: _Window) -> None:
        """Fill shards with what has been received."""
        for shard, begin in window:
            shard.data.detach().view(-1).copy_(_packed(shard, begin, self._incoming))


def _windows(shards: Iterable[TensorShard], window_bytes: int) -> Iterator[_Window]:
    """Put shards into messages of at most so many bytes, or of one shard."""
    window: _Window = []
    for shard in shards:
        begin = _size(window)
        begin += -begin % _ALIGNMENT
        if window and begin + shard.data.nbytes > window_bytes:
            yield window
            window, begin = [], 0
        window.append((shard, begin))
    if window:
        yield window


def _size(window: _Window) -> int:
    return window[-1][1] + window[-1][0].data.nbytes if window else 0


def _packed(shard: TensorShard, begin: int, message: torch.Tensor) -> torch.Tensor:
    """Return the place of a shard's values in a message."""
    return message[begin : begin + shard.data.nbytes].view(shard.dtype)


@dataclass(frozen=True, eq=False)
class Located:
    """A shard, and where its values are in files at a URL.

    Args:
        shard: The shard.
        ranges: Ranges of bytes of files, in the order in which they are read; none where that is not known.
    """

    shard: TensorShard
    ranges: tuple[tuple[StoredFile, int, int], ...] = ()


def locate(source: Source, shards: Iterable[TensorShard], stored: Mapping[str, str]) -> list[Located]:
    """Return shards in the order of their places in the files; those without a known place come last.

    Args:
        source: A checkpoint at a URL.
        shards: The shards that will be filled.
        stored: For each of them that is a tensor of the files as it is stored, by its key, that tensor's name.
    """
    files: dict[int, int] = {}
    placed: list[tuple[tuple[int, int], Located]] = []
    others = []
    for shard in shards:
        place = source.place_of(stored[shard.key]) if shard.key in stored else None
        if place is None or place[0].is_in_memory:
            others.append(Located(shard))
            continue
        bytes_of_file, offset = place
        file = bytes_of_file.file
        assert isinstance(file, StoredFile), "at a URL"
        meta = source.tensors[stored[shard.key]]
        ranges = tuple(
            (file, start, stop)
            for region in regions_of(shard.box, shard.flat)
            for start, stop in bytes_of_file.ranges_of(offset, meta.shape, meta.dtype.itemsize, region.box)
        )
        placed.append(((files.setdefault(id(file), len(files)), ranges[0][1]), Located(shard, ranges)))
    placed.sort(key=lambda entry: entry[0])
    return [*(located for _, located in placed), *others]


def read_ahead(located: Iterable[Located], most_bytes: int) -> None:
    """Start to read what shards need that will be filled in this order.

    Args:
        located: The shards.
        most_bytes: Memory for what has been read and is not in its shard yet.
    """
    ReadAhead((each for one in located for each in one.ranges), most_bytes)
