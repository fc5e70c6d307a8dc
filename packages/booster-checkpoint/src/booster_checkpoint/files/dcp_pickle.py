"""Reads the one pickle that ``torch.distributed.checkpoint`` writes, without making anything of what it names.

`pickle.Unpickler` with a list of allowed classes is not enough: a file can set attributes of an allowed class or
function, and they stay changed for the whole process. This unpickler knows the few opcodes of which DCP's table
consists, and yields numbers, strings, tuples, lists, dicts and `Record`. A class of the table becomes a record with its
name; no class, function or module is ever on the stack. The idea is that of torch's ``weights_only`` unpickler, which
can't be used itself: it reads pickles of protocol 2, and DCP writes protocol 4.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

import torch

from booster_checkpoint.files.parts import MOST_DIMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""Classes that are made without arguments, and then given their state."""


class Record:
    """An instance of one of the table's classes.

    Args:
        kind: The class' name.

    Attributes:
        state: Its attributes; a tuple where the class has a state of its own form; ``None`` until it is known.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def get(self, name: str) -> Any:
        """Return an attribute; ``None`` where it is not set."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Named:
    """What a class or function that the file names becomes on the stack.

    Args:
        name: Its name.
        call: Makes a value of the arguments of a call; ``None`` for classes of records.
    """

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        self.name = name
        self.call = call


def _size(values: Any = ()) -> tuple[int, ...]:
    if type(values) not in (tuple, list) or not all(type(value) is int for value in values):
        msg = "a size is made of something else than numbers"
        raise pickle.UnpicklingError(msg)
    return tuple(values)


def _text(value: Any) -> str:
    """Return the argument of a call whose result is not used: a layout's name, or a memory format's number."""
    if type(value) not in (str, int):
        msg = f"a layout or memory format is made of a {type(value).__name__}"
        raise pickle.UnpicklingError(msg)
    return str(value)


def _path(*parts: Any) -> None:
    """Take the parts of a path, which nothing asks for."""
    if not all(type(part) is str for part in parts):
        msg = "a path is made of something else than strings"
        raise pickle.UnpicklingError(msg)


def _empty_dict() -> dict[Any, Any]:
    return {}


_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _text,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _text,
    ("collections", "OrderedDict"): _empty_dict,
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in _PATHS},
}
"""What is made by a call."""


def _find(module: Any, name: Any) -> Any:
    """Return what stands for something that the file names."""
    if type(module) is str and type(name) is str:
        if (module, name) in _RECORDS:
            return _Named(name)
        if (module, name) in _CALLS:
            return _Named(name, _CALLS[module, name])
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
    msg = f"it refers to {str(module)[:100]}.{str(name)[:100]}"
    raise pickle.UnpicklingError(msg)


def _call(function: Any, arguments: Any) -> Any:
    if type(function) is not _Named or function.call is None or type(arguments) is not tuple:
        what = function.name if type(function) is _Named else f"a {type(function).__name__}"
        msg = f"it calls {what}"
        raise pickle.UnpicklingError(msg)
    return function.call(*arguments)


def _new(cls: Any, arguments: Any) -> Record:
    if type(cls) is not _Named or cls.call is not None or arguments != ():
        what = cls.name if type(cls) is _Named else f"a {type(cls).__name__}"
        msg = f"it makes an instance of {what} with arguments of its own"
        raise pickle.UnpicklingError(msg)
    return Record(cls.name)


def _build(target: Any, state: Any) -> None:
    is_plain = type(state) is dict and all(type(name) is str for name in state)
    if type(target) is not Record or target.state is not None or not (is_plain or type(state) is tuple):
        what = target.name if type(target) is _Named else f"a {type(target).__name__}"
        msg = f"it sets the state of {what}"
        raise pickle.UnpicklingError(msg)
    target.state = state


def place_key(offsets: Iterable[int]) -> bytes:
    """Return where a chunk begins, as text. A file can choose numbers that slow a dict down, but not text."""
    return ",".join(map(str, offsets)).encode()


def _key(value: Any) -> Any:
    """Return the key of a dict. An index becomes its name and the place that it names; other keys are strings."""
    if type(value) is str:
        return value
    if type(value) is Record and value.kind == "MetadataIndex":
        fqn, offset = value.get("fqn"), value.get("offset")
        if type(fqn) is str and (offset is None or len(offset) <= MOST_DIMS):
            return fqn, None if offset is None else place_key(_size(offset))
    msg = f"a {type(value).__name__} is the key of a dict"
    raise pickle.UnpicklingError(msg)


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        msg = f"it sets items of a {type(target).__name__}"
        raise pickle.UnpicklingError(msg)
    for index in range(0, len(items), 2):
        target[_key(items[index])] = items[index + 1]


def _append(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        msg = f"it appends to a {type(target).__name__}"
        raise pickle.UnpicklingError(msg)
    target.extend(items)


_CONSTANTS: dict[int, Any] = {pickle.NONE[0]: None, pickle.NEWTRUE[0]: True, pickle.NEWFALSE[0]: False}
_EMPTY: dict[int, Callable[[], Any]] = {
    pickle.EMPTY_DICT[0]: dict,
    pickle.EMPTY_LIST[0]: list,
    pickle.EMPTY_TUPLE[0]: tuple,
}
_NUMBERS = {
    pickle.BININT1[0]: struct.Struct("<B"),
    pickle.BININT2[0]: struct.Struct("<H"),
    pickle.BININT[0]: struct.Struct("<i"),
    pickle.BINFLOAT[0]: struct.Struct(">d"),
}
_TEXTS = {
    pickle.SHORT_BINUNICODE[0]: struct.Struct("<B"),
    pickle.BINUNICODE[0]: struct.Struct("<I"),
    pickle.BINUNICODE8[0]: struct.Struct("<Q"),
}
_LONGS = {pickle.LONG1[0]: struct.Struct("<B"), pickle.LONG4[0]: struct.Struct("<i")}
_GETS = {pickle.BINGET[0]: struct.Struct("<B"), pickle.LONG_BINGET[0]: struct.Struct("<I")}
_PUTS = {pickle.BINPUT[0]: struct.Struct("<B"), pickle.LONG_BINPUT[0]: struct.Struct("<I")}
_TUPLES = {pickle.TUPLE1[0]: 1, pickle.TUPLE2[0]: 2, pickle.TUPLE3[0]: 3}
_MEMOIZE, _MARK, _TUPLE, _STOP = (code[0] for code in (pickle.MEMOIZE, pickle.MARK, pickle.TUPLE, pickle.STOP))
_SETITEM, _SETITEMS, _APPEND, _APPENDS = (
    code[0] for code in (pickle.SETITEM, pickle.SETITEMS, pickle.APPEND, pickle.APPENDS)
)
_GLOBAL, _STACK_GLOBAL, _REDUCE, _NEWOBJ, _BUILD = (
    code[0] for code in (pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD)
)
_HEADERS = {pickle.PROTO[0]: 1, pickle.FRAME[0]: 8}
"""Opcodes without effect here, and the size of their arguments."""


def _cut(content: bytes, start: int, nbytes: int) -> bytes:
    if nbytes < 0 or start + nbytes > len(content):
        msg = "it ends too early"
        raise EOFError(msg)
    return content[start : start + nbytes]


def load_plain(content: bytes) -> Any:  # noqa: C901, PLR0912, PLR0915 - one branch for each kind of opcode
    """Return what a pickle of DCP's table holds.

    Args:
        content: The pickle.

    Raises:
        pickle.UnpicklingError: If it holds, names or does anything else.
        ValueError, LookupError, EOFError, TypeError, struct.error: If it is damaged.
    """
    stack: list[Any] = []
    outer: list[list[Any]] = []
    memo: dict[int, Any] = {}
    position = 0
    while True:
        code = content[position]
        position += 1
        if code == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code in _GETS:
            stack.append(memo[_GETS[code].unpack_from(content, position)[0]])
            position += _GETS[code].size
        elif code in _NUMBERS:
            stack.append(_NUMBERS[code].unpack_from(content, position)[0])
            position += _NUMBERS[code].size
        elif code in _TEXTS:
            (nbytes,) = _TEXTS[code].unpack_from(content, position)
            position += _TEXTS[code].size
            stack.append(str(_cut(content, position, nbytes), "utf-8", "surrogatepass"))
            position += nbytes
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code in _TUPLES:
            values = tuple(stack[-_TUPLES[code] :])
            if len(values) != _TUPLES[code]:
                raise IndexError(len(stack))
            stack[-_TUPLES[code] :] = [values]
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == _MARK:
            outer.append(stack)
            stack = []
        elif code == _TUPLE:
            values = tuple(stack)
            stack = outer.pop()
            stack.append(values)
        elif code in (_SETITEMS, _APPENDS):
            items = stack
            stack = outer.pop()
            (_set_items if code == _SETITEMS else _append)(stack[-1], items)
        elif code == _SETITEM:
            value, key = stack.pop(), stack.pop()
            _set_items(stack[-1], [key, value])
        elif code == _APPEND:
            value = stack.pop()
            _append(stack[-1], [value])
        elif code == _NEWOBJ:
            arguments, cls = stack.pop(), stack.pop()
            stack.append(_new(cls, arguments))
        elif code == _BUILD:
            state = stack.pop()
            _build(stack[-1], state)
        elif code == _REDUCE:
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif code == _STACK_GLOBAL:
            name, module = stack.pop(), stack.pop()
            stack.append(_find(module, name))
        elif code == _GLOBAL:
            first = content.index(b"\n", position)
            second = content.index(b"\n", first + 1)
            stack.append(_find(content[position:first].decode(), content[first + 1 : second].decode()))
            position = second + 1
        elif code in _PUTS:
            memo[_PUTS[code].unpack_from(content, position)[0]] = stack[-1]
            position += _PUTS[code].size
        elif code in _LONGS:
            (nbytes,) = _LONGS[code].unpack_from(content, position)
            position += _LONGS[code].size
            stack.append(int.from_bytes(_cut(content, position, nbytes), "little", signed=True))
            position += nbytes
        elif code in _HEADERS:
            position += _HEADERS[code]
        elif code == _STOP:
            return stack.pop()
        else:
            msg = f"it uses the opcode {bytes([code])!r}"
            raise pickle.UnpicklingError(msg)
