"""Whether ranks have the same values: a digest to compare, and words for what differs.

Values are put into a plain form first, which is the same on every rank that has equal values: JSON values as they are,
tensors by a digest of their bits, functions and classes by their qualified names, other objects as they are printed,
without addresses. The hash is XXH3 with 128 bits, nine times as fast as SHA-256: ranks don't attack each other.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from booster_core.errors import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_MOST_CHARS = 100
"""Of a value that a message shows."""
_MOST_LISTED = 10
_MARK = "\0"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _Printed(str):
    """Text that stands for an object, and is shown without quotes. It begins with what no other text begins with."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self).removeprefix(_MARK)


def digest(value: Any) -> bytes:
    """Return 16 bytes that are the same for equal values, and for others differ.

    Args:
        value: JSON values, tensors (by dtype, shape and bits) and whatever else has a plain form, in any nest of
            mappings, whose order does not count, lists, tuples and sets.
    """
    text = json.dumps(plain_form(value), sort_keys=True, separators=(",", ":"))
    return bytes(xxhash.xxh3_128_digest(text.encode(errors="surrogatepass")))


def plain_form(value: Any) -> Any:
    """Return a value as dicts with names, lists, tuples and JSON values; text stands for everything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(plain_form(each) for each in value)
    if isinstance(value, Mapping):
        named = ((key if isinstance(key, str) else f"<{plain_form(key)!r}>", each) for key, each in value.items())
        return {key: plain_form(each) for key, each in named}
    if isinstance(value, AbstractSet):
        return sorted((plain_form(each) for each in value), key=repr)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _Printed(f"{_MARK}{len(value)} bytes with digest {xxhash.xxh3_128_hexdigest(value)}")
    return _Printed(_MARK + _text_of(value))


def _text_of(value: Any) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} of {value.dtype} with digest {_bits_digest(value)}"
    if isinstance(value, functools.partial):
        return f"partial{plain_form((value.func, *value.args, value.keywords))!r}"
    if hasattr(value, "__qualname__"):  # functions and classes
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        inside = ", ".join(f"{each.name}={plain_form(getattr(value, each.name))!r}" for each in fields(value))
        return f"{type(value).__qualname__}({inside})"
    return _ADDRESS.sub("", repr(value))


def _bits_digest(tensor: Tensor) -> str:
    import torch

    from booster_core.state.shard import as_bytes

    found = xxhash.xxh3_128()
    if not tensor.is_meta:
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        found.update(as_bytes(dense.resolve_conj().resolve_neg().cpu().contiguous()))
    return str(found.hexdigest())


def describe_differences(name: str, values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Say what ranks disagree about; of mappings, which of their keys.

    Args:
        name: The call.
        values: The plain form of each rank's value.
        ranks: What these ranks are called.
    """
    if not all(isinstance(value, dict) for value in values):
        return f"Ranks disagree about what `{name}` gets: {_holders(values, ranks)}."
    flat = [_flat(value) for value in values]
    found = []
    for key in dict.fromkeys(key for of_rank in flat for key in of_rank):
        of_key = [of_rank.get(key, _Printed("nothing")) for of_rank in flat]
        if len({repr(each) for each in of_key}) > 1:
            found.append(f"`{key}`: {_holders(of_key, ranks)}")
    more = [f"and {len(found) - _MOST_LISTED} more"] if len(found) > _MOST_LISTED else []
    shown = "; ".join(found[:_MOST_LISTED] + more)
    return f"Ranks disagree about {shown}, in `{name}`."


def _holders(values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Return which ranks have which value."""
    holders: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        holders.setdefault(repr(value), []).append(rank)
    texts = {text: text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..." for text in holders}
    return ", ".join(f"{texts[text]} on {name_ranks(who)}" for text, who in holders.items())


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of dicts in dicts by names with dots."""
    flat: dict[str, Any] = {}
    for key, each in value.items():
        if isinstance(each, dict) and each:
            flat |= _flat(each, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = each
    return flat
