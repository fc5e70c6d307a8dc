"""What ranks compare before they read each other's memory: one number for operation, reduction, dtype and splits.

The number of bytes is compared too. Splits are hashed, because there may be many.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_KINDS = ("?", "a reduce-scatter", "an all-gather", "an all-to-all", "a broadcast", "an all-reduce")
REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, ALL_REDUCE = range(1, len(_KINDS))
_REDUCTIONS = ("", "SUM", "AVG", "MAX", "MIN")
_LAYOUT_BITS, _DTYPE_BITS, _REDUCTION_BITS = 31, 16, 8
_LAYOUT_MASK = (1 << _LAYOUT_BITS) - 1
_starts: dict[tuple[int, torch.dtype | None, int], int] = {}
_seen: list[Any] = []


def signature_of(kind: int, dtype: torch.dtype | None, reduction: Any = None, layout: Sequence[int] = ()) -> int:
    """Return the number of an operation; the same in every process.

    Args:
        kind: One of this module's constants.
        dtype: The tensors' dtype.
        reduction: A ``torch.distributed.ReduceOp``, if there is one.
        layout: Offsets of the tensors, and their splits.
    """
    # By the reduction's identity: hashing one takes longer than everything else here.
    key = (kind, dtype, id(reduction))
    start = _starts.get(key)
    if start is None:
        code = 0 if dtype is None else _code_of(dtype)
        number = 0 if reduction is None else _REDUCTIONS.index(reduction.name)
        start = (((kind << _REDUCTION_BITS) | number) << _DTYPE_BITS | code) << _LAYOUT_BITS
        _starts[key] = start
        _seen.append(reduction)  # or another one may have its identity one day
    # Hashes of numbers, and of tuples of them, don't change from process to process.
    return start | hash(tuple(layout)) & _LAYOUT_MASK if layout else start


def _code_of(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode()) & ((1 << _DTYPE_BITS) - 1)


def describe(signature: int, nbytes: int) -> str:
    """Return what an operation is, for messages; ``nbytes`` is negative if lengths differ from rank to rank."""
    signature >>= _LAYOUT_BITS
    code = signature & ((1 << _DTYPE_BITS) - 1)
    signature >>= _DTYPE_BITS
    number = signature & ((1 << _REDUCTION_BITS) - 1)
    kind = signature >> _REDUCTION_BITS
    text = _KINDS[kind] if kind < len(_KINDS) else _KINDS[0]
    if 0 < number < len(_REDUCTIONS):
        text += f" ({_REDUCTIONS[number]})"
    if nbytes >= 0:
        text += f" of {nbytes} bytes"
    if code:
        text += f" of {_name_of(code)}"
    return text


def _name_of(code: int) -> str:
    """Return the name of a dtype, which maybe only another process has used so far."""
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        if _code_of(dtype) == code:
            return str(dtype)
    return "a dtype that this process does not know"
