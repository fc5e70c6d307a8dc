"""Checksums of a file by blocks, so that ranks verify what they read while they read it.

A block is a part of one tensor, or several small pieces in a row; blocks follow each other from the first byte of the
file to the last. A rank that reads a whole block hashes it in its own memory. Of the ranks that read parts of a block,
the one that reads its first byte reads all of it, and the others rely on that: over all ranks, every block of what is
loaded is verified once, and no rank needs to know what others read.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from booster_core.errors import CheckpointDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from booster_checkpoint.storage import Location
    from booster_core.state import Box

    Read = Callable[[memoryview, int], None]
    """Fills memory from a byte offset of a file."""

BLOCK_BYTES = 4 << 20
"""Largest size of a block that is written: checksums of a TiB of them take 4.5 MB of a manifest."""
_CACHED_BYTES = 1 << 20
"""How much of a block is read before it is hashed, so that it is still in a processor's cache."""
LARGEST_READ_BYTES = 16 << 20
"""Largest size of a block that is verified while it is read; files with larger ones are verified ahead of the load."""


@dataclass(frozen=True)
class Block:
    """A range of a file that has a checksum.

    Args:
        nbytes: Its size.
        checksum: The hexadecimal xxh3 (64 bits) of its content.
    """

    nbytes: int
    checksum: str


def block_sizes(pieces: Iterable[int]) -> list[int]:
    """Return the sizes of the blocks of a file.

    Args:
        pieces: The sizes of what is read as one: the header, each tensor. Their sum is the file's size.
    """
    sizes, used = list[int](), 0
    for piece in pieces:
        if used + piece <= BLOCK_BYTES:
            used += piece
            continue
        sizes.append(used)
        whole, used = divmod(piece, BLOCK_BYTES)
        sizes += [BLOCK_BYTES] * whole
        if whole:  # the rest of a tensor that is cut is a block of its own
            sizes.append(used)
            used = 0
    return [size for size in (*sizes, used) if size]


class BlockHasher:
    """Computes the checksums of a file's blocks from its bytes, in their order.

    Args:
        sizes: The sizes of the blocks.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.blocks: list[Block] = []
        self._sizes = iter(sizes)
        self._next()

    def update(self, content: memoryview | bytes) -> None:
        """Take in the bytes that follow."""
        rest = memoryview(content)
        while rest:
            part = rest[: self._left]
            self._digest.update(part)
            self._left -= len(part)
            rest = rest[len(part) :]
            if not self._left:
                self.blocks.append(Block(self._size, self._digest.hexdigest()))
                self._next()

    def _next(self) -> None:
        import xxhash

        self._size = self._left = next(self._sizes, 0)
        self._digest: Any = xxhash.xxh3_64()


def blocks_of_file(place: Location, sizes: Sequence[int], begin: int = 0) -> list[Block]:
    """Return blocks of a file that follow each other, with their checksums; fewer, if the file is too short.

    Args:
        place: The file, of which little is in memory at a time.
        sizes: The sizes of the blocks.
        begin: Where the first one begins.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    hasher = BlockHasher(sizes)
    with contextlib.closing(place.open()) as file:
        for content in file.contents(begin, begin + sum(sizes)):
            hasher.update(content)
    return hasher.blocks


def checksum_of(content: memoryview | bytes) -> str:
    """Return the hexadecimal xxh3 (64 bits) of bytes."""
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(content))


class Kept:
    """The bytes of a file that a box of a tensor is.

    Args:
        offset: Where the tensor's values begin in the file, in bytes.
        shape: Shape of the whole tensor.
        itemsize: Bytes per element.
        box: The box.
    """

    def __init__(self, offset: int, shape: tuple[int, ...], itemsize: int, box: Box) -> None:
        self._offset, self._shape, self._itemsize, self._box = offset, shape, itemsize, box

    def __contains__(self, position: int) -> bool:
        """Whether the byte at a position of the file is one of them; the position is in the tensor."""
        element = (position - self._offset) // self._itemsize
        for size, (start, stop) in zip(reversed(self._shape), reversed(self._box), strict=True):
            element, index = divmod(element, size)
            if not start <= index < stop:
                return False
        return True


class CheckedReads:
    """Verifies the blocks of one file while parts of it are read. Several threads may read at once.

    Args:
        name: The file, for messages.
        blocks: Its blocks.
        is_shared: Other ranks read the rest of blocks that this one reads parts of, from the same disk.
        on_damage: Called with what is wrong, in words, before it is raised.
    """

    def __init__(
        self, name: str, blocks: Sequence[Block], *, is_shared: bool, on_damage: Callable[[str], None]
    ) -> None:
        self._name = name
        self._blocks = blocks
        self._ends = list(itertools.accumulate(block.nbytes for block in blocks))
        self._is_checked = bytearray(len(blocks))
        self._is_shared = is_shared
        self._on_damage = on_damage
        self._last = -1, memoryview(b"")  # one object, which threads replace at once

    def read(self, read: Read, target: memoryview, offset: int, kept: Kept | None = None) -> None:
        """Fill ``target`` from a byte offset, and verify the blocks that are this rank's to verify.

        Args:
            read: Reads the file.
            target: Where the bytes go.
            offset: Where they begin in the file.
            kept: Which of the bytes are wanted, where others are read with them; ``None`` for all.

        Raises:
            CheckpointDamagedError: If a block is not what was saved.
        """
        index = bisect_right(self._ends, offset)
        while target and index < len(self._ends):
            begin, end = self._ends[index] - self._blocks[index].nbytes, self._ends[index]
            part = target[: end - offset]
            has_first = begin >= offset and (kept is None or begin in kept)
            is_ours = has_first or not self._is_shared
            if len(part) == end - begin:
                self._read_whole(index, read, part, is_checked=is_ours)
            elif self._last[0] == index or (is_ours and not self._is_checked[index]):
                part[:] = self._whole(index, read)[offset - begin : offset - begin + len(part)]
            else:
                read(part, offset)
            target, offset, index = target[len(part) :], end, index + 1
        if target:  # beyond the last block is beyond the end, which the reader reports
            read(target, offset)

    def end_of_block(self, position: int) -> int:
        """Return where the block ends that contains the byte before a position."""
        index = bisect_right(self._ends, position - 1)
        return self._ends[index] if index < len(self._ends) else position

    def _whole(self, index: int, read: Read) -> memoryview:
        """Return a verified block, and keep it: whoever reads on from here wants the rest of it next."""
        number, content = self._last
        if number != index:
            content = np.empty(self._blocks[index].nbytes, dtype=np.uint8).data
            self._read_whole(index, read, content, is_checked=True)
            self._last = index, content
        return content

    def _read_whole(self, index: int, read: Read, target: memoryview, *, is_checked: bool) -> None:
        """Read a block, and verify it piece by piece as it comes."""
        import xxhash

        block, digest = self._blocks[index], xxhash.xxh3_64()
        for start in range(0, len(target), _CACHED_BYTES if is_checked else len(target)):
            part = target[start : start + _CACHED_BYTES] if is_checked else target
            read(part, self._ends[index] - block.nbytes + start)
            if is_checked:
                digest.update(part)
        if not is_checked:
            return
        found = digest.hexdigest()
        if found != block.checksum:
            problem = difference(self._name, self._ends[index] - block.nbytes, block, found)
            self._on_damage(problem)
            msg = f"{problem}."
            raise CheckpointDamagedError(msg)
        self._is_checked[index] = 1


def difference(name: str, begin: int, block: Block, found: str) -> str:
    """Return, in words, that a block is not what was saved."""
    where = f"bytes {begin} to {begin + block.nbytes}"
    return f"'{name}' has the checksum {found} in {where}, and was saved with {block.checksum}"
