"""`refuse_renamed`: what to pass in place of arguments that a plugin does not take, where that is known."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
