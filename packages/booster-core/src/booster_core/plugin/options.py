"""Check the options of a plugin: their types, by annotations, and arguments that it does not take."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (numbers.Integral,),
    "float": (numbers.Real,),
    "str": (str,),
    "None": (type(None),),
}


def check_option_types(options: DataclassInstance) -> None:
    """Check each option that is annotated by ``bool``, ``int``, ``float``, ``str`` and ``None`` alone.

    Args:
        options: A dataclass, whose module postpones annotations.

    Raises:
        TypeError: Naming the first option of another type, its value and what it takes.
    """
    check_argument_types({field.name: field.type for field in fields(options)}, vars(options))


def check_argument_types(annotations: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Check values as `check_option_types` does, and sequences of such types.

    Args:
        annotations: By name; what is annotated in another way is not checked.
        values: By name.

    Raises:
        TypeError: As there.
    """
    for name, annotation in annotations.items():
        taken = str(annotation).split(" | ")
        if all(each.removeprefix("Sequence[").removesuffix("]") in _TYPES for each in taken) and not any(
            _is_of(values[name], each) for each in taken
        ):
            msg = f"`{name}={values[name]!r}` must be of type {' or '.join(taken)}, not {type(values[name]).__name__}."
            raise TypeError(msg)


def _is_of(value: Any, name: str) -> bool:
    if name.startswith("Sequence["):
        inner = name.removeprefix("Sequence[").removesuffix("]")
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_is_of(each, inner) for each in value)
    return isinstance(value, _TYPES[name]) and (name == "bool" or not isinstance(value, bool))


def refuse_renamed(kind: type, renamed: Mapping[str, str], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise for arguments of a constructor that it does not take, if it is known what stands for them.

    Args:
        kind: The class.
        renamed: What to do in the place of passing an argument, by its name.
        args: The arguments without names.
        named: Those with names.

    Raises:
        TypeError: For the first that it does not take.
    """
    if not args and named.keys().isdisjoint(renamed):
        return
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]  # type: ignore[misc] # as it is called
    taken = {each.name for each in parameters}
    for name in named:
        if name in renamed and name not in taken:
            msg = f"{kind.__name__} has no argument `{name}`: {renamed[name]}."
            raise TypeError(msg)
    if args and parameters and all(each.kind is each.KEYWORD_ONLY for each in parameters):
        msg = (
            f"{kind.__name__} takes its arguments by name, such as `{parameters[0].name}=...`; got {args[0]!r} without "
            "one."
        )
        raise TypeError(msg)
