"""A short number for how each storage of a recording gets its values, to compare recordings of several processes.

It is made of what the values depend on: operations, shapes, scalars, the values of constants, and which draws come
before. Where something else comes in between (libraries let threads read files), it stays the same; so it does where
generators are seeded otherwise, since ranks replay the first rank's seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash
from torch.utils._pytree import tree_leaves

from booster_runtime.lazy.files import FileRead
from booster_runtime.lazy.generators import address_of
from booster_runtime.lazy.log import Constant, Entry, Ref
from booster_runtime.lazy.replay import find_live

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from booster_runtime.lazy.generators import Draw

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.layout, torch.memory_format)


def fingerprints(entries: Sequence[Entry], wanted: Collection[int]) -> dict[int, bytes]:
    """Return for each wanted slot some bytes that are the same in every process which gives it the same values.

    Args:
        entries: The recording.
        wanted: Storages.

    Raises:
        LazyInitError: If a file was changed since it was recorded, or can't be read any more.
    """
    of_slot: dict[int, bytes] = {}
    live = set(find_live(entries, wanted))
    numbers: dict[Draw | int, int] = {}
    for index, entry in enumerate(entries):
        drawn = "" if entry.draw is None else _described_draw(entry.draw, numbers)
        if index not in live:
            continue
        digest = xxhash.xxh3_64(f"{_operation(entry)} {entry.dtype} {drawn}".encode())
        leaves = tree_leaves((entry.args, entry.kwargs))
        for leaf in leaves:
            digest.update(_described(leaf, entry, of_slot))
        if isinstance(entry.function, FileRead):
            digest.update(entry.function.sample())
        value = digest.digest()
        written = dict.fromkeys(leaf.slot for leaf in leaves if isinstance(leaf, Ref) and leaf.slot in entry.writes)
        for number, slot in enumerate(written):
            of_slot[slot] = value + number.to_bytes(4, "big")
        for number, ref in entry.results:
            of_slot[ref.slot] = value + f"{number} {geometry(ref)}".encode()
    return {slot: xxhash.xxh3_64_digest(of_slot.get(slot, b"")) for slot in wanted}


def geometry(ref: Ref) -> str:
    """Return what a view is of its storage, wherever that is."""
    return f"{ref.dtype} {tuple(ref.size)} {tuple(ref.stride)} {ref.offset}"


def _described_draw(draw: Draw, numbers: dict[Draw | int, int]) -> str:
    """Return which numbers of which generator a draw takes, if all processes seed them alike."""
    numbers[draw] = len(numbers)
    source = numbers.setdefault(address_of(draw.generator), len(numbers))
    start: object = "seeded" if draw.previous is None else numbers.get(draw.previous)
    if start is None and draw.previous is not None and draw.previous.end is not None:
        start = draw.previous.end.numpy().tobytes()  # after a draw that ran at once, from this process' own seed
    return f"draw {source} {start!r}"


def _operation(entry: Entry) -> str:
    return str(entry.function) if isinstance(entry.function, torch._ops.OpOverload) else entry.name  # noqa: SLF001 - the class has no public name


def _described(leaf: object, entry: Entry, of_slot: dict[int, bytes]) -> bytes:
    if isinstance(leaf, Ref):
        is_read = not leaf.is_shape_only and (leaf.slot in entry.reads or leaf.slot not in entry.covers)
        return geometry(leaf).encode() + (of_slot.get(leaf.slot, b"") if is_read else b"-")
    if isinstance(leaf, Constant):
        return leaf.digest.to_bytes(8, "big")
    if isinstance(leaf, torch.Tensor):  # on meta
        return f"{leaf.dtype} {tuple(leaf.shape)}".encode()
    if isinstance(leaf, torch.device):
        return leaf.type.encode()
    return (repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__).encode() + b";"
