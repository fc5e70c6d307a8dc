"""Python values that are not tensors, as JSON and back, exactly: never a pickle.

Plain JSON values stay as they are, so files remain readable. What JSON lacks (tuples, dicts with other keys than
strings, infinities, bytes, ...) becomes a dict with one key that starts with ``$``. Tensors are handed out to be
stored as tensors, and leave a reference behind. Anything else is refused by name.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import sys
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import CheckpointDamagedError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

_DTYPE_PREFIX = "torch."
_LONGEST_NAME = 1 << 13
"""Of a tensor inside of a value. Names of parameters have a hundred characters."""
_Path = tuple["_Path | None", Any]
"""The keys that lead to a value: those that lead to what it is in, and its own."""

_CHECKSUM_LETTERS = 16
"""64 bits in hexadecimal."""


def encode_json(value: Any, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return a value as JSON.

    Args:
        value: Built of None, bool, int, float, str, bytes, list, tuple, set, dict, Counter, dtypes and tensors.
        name: What the value is; names it in errors, and is the start of its tensors' keys.
        tensors: Filled with the tensors found, under the key ``name`` for a tensor itself and ``name/path`` inside of
            something. Where ``None``, tensors are written into the JSON as numbers.

    Raises:
        CheckpointError: If something in the value has no JSON form; the message says where.
    """
    try:
        return _encode(value, (None, name), tensors)
    except RecursionError as error:
        msg = f"'{name}' cannot be saved: it contains itself, or is nested too deeply."
        raise CheckpointError(msg) from error


def _name_of(path: _Path | None) -> str:
    """Return a path as text. Only where it is needed: a file can hold many values below a key of a megabyte."""
    steps = []
    while path is not None:
        path, step = path
        steps.append(str(step))
    return "/".join(reversed(steps))


def _encode(  # noqa: C901, PLR0911 - one line for each kind of value
    value: Any, path: _Path, tensors: dict[str, torch.Tensor] | None
) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix(_DTYPE_PREFIX)}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_dict(value, path, tensors)
    if type(value) in (list, tuple, set, torch.Size):
        items = _in_order(value) if isinstance(value, set) else value
        encoded = [_encode(item, (path, index), tensors) for index, item in enumerate(items)]
        if isinstance(value, list):
            return encoded
        return {"$set" if isinstance(value, set) else "$tuple": encoded}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _encode(value.item(), path, tensors)
    msg = (
        f"'{_name_of(path)}' is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: "
        "checkpoints hold tensors and JSON values, never pickled objects. Keep plain numbers, strings, lists, dicts or "
        "tensors there."
    )
    raise CheckpointError(msg)


def _in_order(values: set[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:  # of several kinds
        return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


def _encode_dict(value: Mapping[Any, Any], path: _Path, tensors: dict[str, torch.Tensor] | None) -> Any:
    pairs = [(key, _encode(item, (path, key), tensors)) for key, item in value.items()]
    if type(value) is not Counter and all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    tag = "$counter" if type(value) is Counter else "$dict"
    return {tag: [[_encode(key, (path, key), None), item] for key, item in pairs]}


def is_made_of_tensors(value: torch.Tensor) -> bool:
    """Return whether a tensor stands for others, such as torchao's state in 8 bits: codes, scales and a table."""
    return hasattr(value, "__tensor_flatten__") and not _is_dtensor(value)


def _is_dtensor(value: torch.Tensor) -> bool:
    return any(each.__name__ == "DTensor" for each in type(value).__mro__)


def _encode_tensor(value: torch.Tensor, path: _Path, tensors: dict[str, torch.Tensor] | None) -> Any:
    if is_made_of_tensors(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return {
            "$made_of": {name: _encode(getattr(value, name), (path, name), tensors) for name in names},
            "class": [type(value).__module__, type(value).__qualname__],
            "context": _encode(context, (path, "context"), None),
            "form": [list(value.shape), list(value.stride())],
        }
    if tensors is not None:
        name = _name_of(path)
        if len(name) > _LONGEST_NAME:
            msg = (
                f"The tensor '{name[:100]}...' has a name of {len(name)} characters, made of the keys that lead to it; "
                f"{_LONGEST_NAME} is the most. Keep it under shorter keys."
            )
            raise CheckpointError(msg)
        tensors[name] = value
        return {"$tensor": name}
    dtype = str(value.dtype).removeprefix(_DTYPE_PREFIX)
    return {"$values": _encode(value.detach().cpu().tolist(), path, None), "$dtype": dtype}


def check_plain_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointError` unless all of a user's tensors can be saved as they are."""
    for name, tensor in tensors.items():
        if _is_dtensor(tensor) or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}"
            msg = f"'{name}' is no plain tensor ({kind}) and cannot be saved. Keep whole, dense tensors there."
            raise CheckpointError(msg)


def decode_json(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the value that `encode_json` made ``value`` of.

    Args:
        value: JSON.
        tensors: The tensors that references name.

    Raises:
        CheckpointError: If a reference names no tensor, or a tag is unknown.
    """
    try:
        return _decode(value, tensors)
    except RecursionError as error:
        msg = "A value in a checkpoint is nested too deeply: it is damaged or hostile."
        raise CheckpointError(msg) from error


def _decode(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    return _decode_tagged(tag, value, tensors)


def _decode_tagged(tag: str, value: dict[str, Any], tensors: Mapping[str, torch.Tensor] | None) -> Any:
    inner = value[tag]
    try:
        if tag == "$tensor":
            return (tensors or {})[inner]
        if tag == "$values":
            return torch.tensor(_decode(inner), dtype=_dtype(value["$dtype"]))
        if tag == "$made_of":
            return _made_of(value, tensors)
        if tag in ("$dict", "$counter"):
            pairs = {_decode(key): _decode(item, tensors) for key, item in inner}
            return Counter(pairs) if tag == "$counter" else pairs
        decoders: dict[str, Callable[[Any], Any]] = {
            "$float": float,
            "$bytes": base64.b64decode,
            "$dtype": _dtype,
            "$tuple": lambda items: tuple(_decode(items, tensors)),
            "$set": lambda items: set(_decode(items, tensors)),
        }
        return decoders[tag](inner)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"The value {str(value)[:200]} in a checkpoint cannot be read: {error}."
        raise CheckpointError(msg) from error


def _made_of(value: dict[str, Any], tensors: Mapping[str, torch.Tensor] | None) -> Any:
    """Return a tensor that stands for others, of a class that this process knows: none is imported."""
    module, name = value["class"]
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
        msg = f"{module}.{name} is not known here; import its library, as the script that saved did"
        raise TypeError(msg)
    shape, stride = value["form"]
    parts = {part: _decode(inner, tensors) for part, inner in value["$made_of"].items()}
    return kind.__tensor_unflatten__(parts, _decode(value["context"]), torch.Size(shape), tuple(stride))


def parts_of_tensors(value: Any) -> list[str]:
    """Return the keys of the tensors of which others are made in an encoded value, as `tensor_references` does."""
    if isinstance(value, list):
        return [key for item in value for key in parts_of_tensors(item)]
    if isinstance(value, dict):
        inner = value.values()
        return (
            tensor_references(value["$made_of"])
            if "$made_of" in value
            else [key for item in inner for key in parts_of_tensors(item)]
        )
    return []


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        msg = f"'{name}' is no dtype"
        raise TypeError(msg)
    return dtype


def tensor_references(value: Any) -> list[str]:
    """Return the keys of the tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [key for item in value for key in tensor_references(item)]
    if isinstance(value, dict):
        if "$tensor" in value:
            return [value["$tensor"]]
        return [key for item in value.values() for key in tensor_references(item)]
    return []


def decode_extra_state(
    names: Iterable[str],
    values: Mapping[str, Any],
    tensors: Collection[str],
    read: Callable[[str], torch.Tensor],
    read_referenced: Callable[[str], torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Return the extra state of modules, decoded, for those of the names that have some.

    Args:
        names: Names of extra state (``layer._extra_state``).
        values: Encoded values, by name.
        tensors: Names of the tensors, of which extra state may be one.
        read: Returns all of a tensor.
        read_referenced: The same for the tensors that values refer to, where these go by other names.
    """
    found = {}
    for name in names:
        if name in values:
            referenced = {key: (read_referenced or read)(key) for key in tensor_references(values[name])}
            found[name] = decode_json(values[name], referenced)
        elif name in tensors:
            found[name] = read(name)
    return found


def parse_json(written: bytes, where: str) -> Any:
    """Return what a JSON file holds.

    Args:
        written: Its bytes.
        where: The file, for messages.

    Raises:
        CheckpointDamagedError: If it is not JSON.
    """
    try:
        return json.loads(written.decode())
    except (ValueError, RecursionError) as error:
        msg = f"'{where}' is not valid JSON ({error}); it is damaged or truncated."
        raise CheckpointDamagedError(msg) from error


def encode_runs(numbers: Iterable[int]) -> str:
    """Return numbers as text in which equal ones that follow each other are counted: ``"4194304x250 1234"``."""
    runs = ((number, sum(1 for _ in same)) for number, same in itertools.groupby(numbers))
    return " ".join(f"{number}x{count}" if count > 1 else f"{number}" for number, count in runs)


def decode_runs(text: str, length: int) -> list[int]:
    """Return the numbers that `encode_runs` was given.

    Args:
        text: What it returned.
        length: How many they are.

    Raises:
        ValueError: If they are not that many, or the text is something else.
    """
    runs = [[int(part) for part in run.split("x", 1)] for run in text.split()]
    counts = [run[1] if len(run) > 1 else 1 for run in runs]
    if min(counts, default=1) < 1 or sum(counts) != length:
        msg = f"{sum(counts)} numbers in place of {length}"
        raise ValueError(msg)
    return [run[0] for run, count in zip(runs, counts, strict=True) for _ in range(count)]


def split_checksums(text: str) -> list[str]:
    """Return the checksums that a manifest holds of a file's blocks, which it writes one after the other."""
    return [text[start : start + _CHECKSUM_LETTERS] for start in range(0, len(text), _CHECKSUM_LETTERS)]
