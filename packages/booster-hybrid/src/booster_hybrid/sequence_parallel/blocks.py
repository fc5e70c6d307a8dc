"""Which parts of the queries attend to which parts of the keys, as blocks that a kernel computes in one call.

A plain causal or full attention needs one block for each visiting rank. Any other mask is cut into tiles: tiles that
hide everything are skipped, tiles that hide nothing are joined along the keys, and only the others need a mask, of
their own size. So a mask of the whole sequence never exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from booster_hybrid.sequence_parallel.mask import Visibility

    _Range = tuple[int, int]

TILE = 512
"""Largest number of queries, and of keys, of a block that needs a mask: 1 MiB of it in fp32 for each sample."""


@dataclass(frozen=True)
class Block:
    """Queries and keys whose scores one call of a kernel computes.

    Args:
        samples: Which samples of the batch.
        queries: Which of this rank's queries.
        keys: Which of the visiting keys.
        kind: ``"all"`` where every query sees every key, ``"causal"`` where query ``i`` of the block sees its keys up
            to ``i``, ``"some"`` where a mask says it.
        query_range: Positions of the queries in their sequence; only of blocks within one piece of it.
        key_range: Positions of the keys, likewise.
        number: Index of the block among those of one pass.
    """

    samples: slice
    queries: slice
    keys: slice
    kind: str
    query_range: _Range
    key_range: _Range
    number: int


def find_blocks(
    own: Sequence[_Range], theirs: Sequence[_Range], visibility: Visibility, *, first_number: int = 0, is_cut: bool
) -> Iterator[Block]:
    """Yield the blocks in which this rank's queries see some of a visiting rank's keys.

    Args:
        own: Positions of the queries, in increasing order.
        theirs: Positions of the keys.
        visibility: Who may attend to whom.
        first_number: Number of the first block.
        is_cut: Yield blocks of at most `TILE` queries and keys, each within one piece of either sequence.
    """
    is_plain = visibility.is_plain and not is_cut
    if is_plain and not visibility.is_causal:
        found = _everything(own, theirs)
    elif is_plain and (list(own) == list(theirs) or _are_apart(own, theirs)):
        found = _causal(own, theirs)
    else:
        found = _tiles(own, theirs, visibility, is_cut=is_cut)
    for number, (samples, queries, keys, kind, positions) in enumerate(found, first_number):
        yield Block(samples, queries, keys, kind, *positions, number)


def whole_block(own: Sequence[_Range], theirs: Sequence[_Range], number: int) -> Iterator[Block]:
    """Yield all of this rank's queries and of a visiting rank's keys as one block, for a kernel that takes rules."""
    for samples, queries, keys, _, positions in _everything(own, theirs):
        yield Block(samples, queries, keys, "some", *positions, number)


_Found = tuple[slice, slice, slice, str, tuple["_Range", "_Range"]]
_ALL = slice(None)
_NOWHERE = ((0, 0), (0, 0))


def _everything(own: Sequence[_Range], theirs: Sequence[_Range]) -> Iterator[_Found]:
    rows, columns = (sum(stop - start for start, stop in each) for each in (own, theirs))
    if rows and columns:
        yield _ALL, slice(0, rows), slice(0, columns), "all", _NOWHERE


def _are_apart(own: Sequence[_Range], theirs: Sequence[_Range]) -> bool:
    """Return whether each piece of the queries is before or after each piece of the keys."""
    return all(last <= start or stop <= first for first, last in own for start, stop in theirs)


def _causal(own: Sequence[_Range], theirs: Sequence[_Range]) -> Iterator[_Found]:
    """Yield the blocks under a causal mask of pieces that are the same, or of which none overlap.

    Positions on a rank are in the order of the sequence, so its own queries see its own keys by a triangle. What a
    query sees of another rank are the first of its keys.
    """
    if list(own) == list(theirs):
        rows = sum(stop - start for start, stop in own)
        if rows:
            yield _ALL, slice(0, rows), slice(0, rows), "causal", _NOWHERE
        return
    row, begin, seen = 0, 0, 0
    for first, last in own:
        now = sum(stop - start for start, stop in theirs if stop <= first)
        if now != seen:
            if seen and begin < row:
                yield _ALL, slice(begin, row), slice(0, seen), "all", _NOWHERE
            begin, seen = row, now
        row += last - first
    if seen and begin < row:
        yield _ALL, slice(begin, row), slice(0, seen), "all", _NOWHERE


def _tiles(
    own: Sequence[_Range], theirs: Sequence[_Range], visibility: Visibility, *, is_cut: bool
) -> Iterator[_Found]:
    row = 0
    for first, last in own:
        for band in _cuts(first, last):
            column = 0
            for start, stop in theirs:
                if start == stop:
                    continue
                for samples, kinds in visibility.kinds(band, (start, stop), _cuts(start, stop)):
                    for keys, kind in kinds if is_cut else _joined(kinds):
                        if kind != "none":
                            queries = slice(row + band[0] - first, row + band[1] - first)
                            yield samples, queries, _shifted(keys, column - start), kind, (band, keys)
                column += stop - start
        row += last - first


def _cuts(start: int, stop: int) -> list[_Range]:
    """Cut a range into tiles."""
    return [(each, min(each + TILE, stop)) for each in range(start, stop, TILE)]


def _joined(kinds: Sequence[tuple[_Range, str]]) -> list[tuple[_Range, str]]:
    """Join neighbors that hide nothing."""
    result: list[tuple[_Range, str]] = []
    for keys, kind in kinds:
        if result and kind == result[-1][1] == "all":
            result[-1] = ((result[-1][0][0], keys[1]), kind)
        else:
            result.append((keys, kind))
    return result


def _shifted(span: _Range, offset: int) -> slice:
    return slice(span[0] + offset, span[1] + offset)
