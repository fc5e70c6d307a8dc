"""`outside_of_graphs`: functions that ``torch.compile`` calls as they are, between the graphs that it makes.

What a collective does can't be traced: it tells other processes addresses, and waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def outside_of_graphs(function: F) -> F:
    """Return a function that is never traced.

    Args:
        function: The function or method.
    """
    # `torch.compiler.disable` imports the compiler at once, which takes longer than all the rest; this is what torch's
    # optimizers use, and waits for the first call.
    disabled: Any = _disable_dynamo(function)
    result: F = disabled
    return result
