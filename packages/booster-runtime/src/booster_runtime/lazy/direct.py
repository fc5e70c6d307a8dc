"""Finds tensors whose final values are those of a file, so that a rank may read just the part that it keeps."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from booster_runtime.lazy.files import FileRead
from booster_runtime.lazy.log import Ref
from booster_runtime.lazy.plan import find_live

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from booster_runtime.lazy.log import Entry


def find_reads(entries: Sequence[Entry], wanted: Collection[int]) -> dict[int, FileRead]:
    """Return for each wanted slot that holds a file's tensor, at most converted to another dtype, how it is read.

    Collective: none.
    """
    is_live = find_live(entries, wanted)
    touching: dict[int, list[Entry]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if is_live[index]:
            for slot in entry.touches:
                touching[slot].append(entry)
    found = {}
    for slot in wanted:
        makers = [entry for entry in touching[slot] if slot not in entry.reads or slot in entry.writes]
        if len(makers) == 1:
            read = _read_behind(makers[0], touching)
            if read is not None:
                found[slot] = read
    return found


def _read_behind(maker: Entry, touching: dict[int, list[Entry]]) -> FileRead | None:
    """Return the read that an entry is, or whose values it converts."""
    if isinstance(maker.function, FileRead):
        return maker.function
    if maker.name != "aten::_to_copy" or not maker.results or not isinstance(maker.args[0], Ref):
        return None
    taken, made = maker.args[0], maker.results[0][1]
    is_whole = (taken.size, taken.stride, taken.offset) == (made.size, made.stride, made.offset)
    makers = [entry for entry in touching[taken.slot] if taken.slot not in entry.reads or taken.slot in entry.writes]
    if not is_whole or len(makers) != 1 or not isinstance(makers[0].function, FileRead):
        return None
    return makers[0].function
