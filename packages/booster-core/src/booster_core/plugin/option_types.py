"""Check the types of a plugin's options by the annotations of the dataclass that holds them."""

from __future__ import annotations

import numbers
from dataclasses import fields
from typing import TYPE_CHECKING

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
    for field in fields(options):
        taken = str(field.type).split(" | ")
        value = getattr(options, field.name)
        if not all(name in _TYPES for name in taken):
            continue
        is_bool_for_number = isinstance(value, bool) and "bool" not in taken
        if is_bool_for_number or not isinstance(value, tuple(kind for name in taken for kind in _TYPES[name])):
            msg = f"`{field.name}={value!r}` must be of type {' or '.join(taken)}, not {type(value).__name__}."
            raise TypeError(msg)
