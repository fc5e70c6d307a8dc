"""Refuses pickles that would grow far beyond their size, before torch reads them.

torch's ``weights_only`` unpickler runs nothing, but a file of a kilobyte can keep it, and whoever looks at the result,
busy for ever: a list that holds another one twice, which holds another one twice, and so on, takes a few bytes for
each doubling. So the opcodes are followed here with nothing but sizes on the stack: for each value, how many values
and characters it has when all that is shared in it is written out, and how deep it is.
"""

from __future__ import annotations

import pickle
import struct
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FREE_SIZE = 1 << 17
"""What any file may expand to."""
_FREE_CONTAINERS, _CONTAINER_BYTES = 1 << 14, 8
"""How many lists, dicts and sets any file may hold, and how many bytes each further one takes at least.

Empty ones take a byte, and half a kilobyte of a reader's memory; a list of two numbers takes ten bytes.
"""
_MOST_DEEP = 500
"""How deep values may be nested; Python's own limit for functions that call each other is 1,000."""


class PickleGrowsError(pickle.UnpicklingError):
    """A pickle expands far beyond its size, or is nested too deeply."""


class _Value:
    """What is known of a value on the stack.

    Args:
        size: How many values and characters it has, itself included, if each were written out.
        depth: How many levels.
        name: Of a class or function, its name.
        is_number: It is an integer, or a tuple whose first value is one.
    """

    __slots__ = ("depth", "is_number", "is_shared", "name", "size")

    def __init__(self, size: int = 1, depth: int = 0, name: str = "", *, is_number: bool = False) -> None:
        self.size = size
        self.depth = depth
        self.name = name
        self.is_number = is_number
        self.is_shared = False

    @classmethod
    def of(cls, values: Sequence[_Value]) -> _Value:
        """Return a tuple."""
        made = cls(is_number=bool(values) and values[0].is_number)
        made.hold(values)
        return made

    def hold(self, values: Sequence[_Value]) -> None:
        """Put values into this one."""
        for value in values:
            self.size += value.size
            self.depth = max(self.depth, value.depth + 1)


_ONE, _NUMBER = _Value(), _Value(is_number=True)
"""Values that hold no others are all alike, and most of what a large file has."""
_PLAIN = {
    **dict.fromkeys((pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_TUPLE), (0, _ONE)),
    pickle.BININT1: (1, _NUMBER),
    pickle.BININT2: (2, _NUMBER),
    pickle.BININT: (4, _NUMBER),
    pickle.BINFLOAT: (8, _ONE),
}
"""Opcodes that push such a value: how many bytes of the file follow, and the value."""
_EMPTY = (pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET)
_TEXTS = {pickle.BINUNICODE: "<I", pickle.SHORT_BINSTRING: "<B", pickle.LONG1: "<B"}
"""Opcodes that push text or a number, and how its length is given."""
_MEMO = {pickle.BINGET: "<B", pickle.LONG_BINGET: "<I", pickle.BINPUT: "<B", pickle.LONG_BINPUT: "<I"}
_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}
_ONTO = {pickle.APPEND: 1, pickle.SETITEM: 2, pickle.BUILD: 1}
"""Opcodes that put the last values on the stack into the one before, and how many."""
_CALLS = (pickle.REDUCE, pickle.NEWOBJ)
_TOO_EARLY = "it ends too early"


def check_pickle(stream: IO[bytes], nbytes: int) -> None:  # noqa: C901, PLR0912, PLR0915 - a branch a kind of opcode
    """Follow one pickle to its end.

    Args:
        stream: Where it begins.
        nbytes: The size of the file, which bounds what the pickle may expand to.

    Raises:
        PickleGrowsError: If it expands to far more than that, is nested too deeply, or contains itself.
        pickle.UnpicklingError: If it uses what ``weights_only`` refuses.
        LookupError, EOFError, struct.error: If it is damaged.
    """
    most = max(nbytes, _FREE_SIZE)
    stack: list[_Value] = []
    outer: list[list[_Value]] = []
    memo: dict[int, _Value] = {}
    read, begin, num_containers = stream.read, stream.tell(), 0
    while (code := read(1)) != pickle.STOP:
        if code in _PLAIN:
            nbytes_after, value = _PLAIN[code]
            if nbytes_after:
                _exactly(stream, nbytes_after)
            stack.append(value)
            continue
        if code in _EMPTY:
            num_containers += 1
            if num_containers > _FREE_CONTAINERS + (stream.tell() - begin) // _CONTAINER_BYTES:
                msg = f"it holds {num_containers} lists, dicts and sets in {stream.tell() - begin} bytes"
                raise PickleGrowsError(msg)
            stack.append(_Value())
            continue
        if code in _MEMO:
            (index,) = struct.unpack(_MEMO[code], _exactly(stream, struct.calcsize(_MEMO[code])))
            if code in (pickle.BINPUT, pickle.LONG_BINPUT):
                memo[index] = stack[-1]
            else:
                memo[index].is_shared = True
                stack.append(memo[index])
            continue
        if code in _TEXTS:
            (length,) = struct.unpack(_TEXTS[code], _exactly(stream, struct.calcsize(_TEXTS[code])))
            _exactly(stream, length)
            stack.append(_Value(1 + length, is_number=code == pickle.LONG1))
            continue
        if code == pickle.PROTO:
            _exactly(stream, 1)
            continue
        if code == pickle.MARK:
            outer.append(stack)
            stack = []
            continue
        if code == pickle.GLOBAL:
            name = stream.readline()[:-1] + b"." + stream.readline()[:-1]
            stack.append(_Value(name=name.decode()))
            continue
        if code in _TUPLES:
            stack.append(_Value.of(_last(stack, _TUPLES[code])))
        elif code == pickle.TUPLE:
            made, stack = _Value.of(stack), outer.pop()
            stack.append(made)
        elif code in _ONTO:
            _put_into(stack, _last(stack, _ONTO[code]))
        elif code in (pickle.APPENDS, pickle.SETITEMS):
            items, stack = stack, outer.pop()
            _put_into(stack, items)
        elif code in _CALLS:
            arguments, function = stack.pop(), stack.pop()
            stack.append(_called(function, arguments))
        elif code == pickle.BINPERSID:
            stack[-1] = _Value(1 + stack[-1].size)
        else:
            if not code:
                raise EOFError(_TOO_EARLY)
            msg = f"it uses the opcode {code!r}"
            raise pickle.UnpicklingError(msg)
        if stack[-1].size > most or stack[-1].depth > _MOST_DEEP:
            msg = (
                f"a value in it is nested more than {_MOST_DEEP} levels deep"
                if stack[-1].depth > _MOST_DEEP
                else f"a value in it expands to more than {most} values, in a file of {nbytes} bytes"
            )
            raise PickleGrowsError(msg)


def _exactly(stream: IO[bytes], nbytes: int) -> bytes:
    content = stream.read(nbytes)
    if len(content) < nbytes:
        raise EOFError(_TOO_EARLY)
    return content


def _last(stack: list[_Value], count: int) -> list[_Value]:
    """Take the last values off the stack."""
    if len(stack) < count:
        raise IndexError(len(stack))
    values = stack[-count:]
    del stack[-count:]
    return values


def _put_into(stack: list[_Value], values: Sequence[_Value]) -> None:
    """Put values into the one on top of the stack, which must not be part of another one yet."""
    if stack[-1] in (_ONE, _NUMBER):
        msg = "it puts a value into one that holds no others"
        raise pickle.UnpicklingError(msg)
    if stack[-1].is_shared:  # what already holds it would grow unseen
        msg = "a value in it is changed after it was used, or contains itself"
        raise PickleGrowsError(msg)
    stack[-1].hold(values)


def _called(function: _Value, arguments: _Value) -> _Value:
    """Return what a call makes: as much as its arguments hold."""
    if not function.name:
        msg = "it calls what is neither a class nor a function"
        raise pickle.UnpicklingError(msg)
    if function.name.endswith(".bytearray") and arguments.is_number:  # so many zeros
        msg = "it makes a bytearray of a length"
        raise PickleGrowsError(msg)
    return _Value(1 + arguments.size, arguments.depth)
