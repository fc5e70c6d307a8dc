"""Formulas of floating point operations: those that torch's counter lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Callable


def _of_grouped_products(first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Return the operations of products of each expert's rows, or columns, with a matrix of its own.

    Args:
        first: The first operand, or its shape.
        second: The second one, or its shape.
    """
    one, other = getattr(first, "shape", first), getattr(second, "shape", second)
    groups = one[0] if len(one) == len(other) == 3 else 1  # else each row or column is in one group
    return int(2 * groups * one[-2] * one[-1] * other[-1])


GROUPED_PRODUCTS: Any = getattr(torch.ops.aten, "_grouped_mm", None)
"""How a mixture computes all experts at once; older versions of torch don't have it."""
MORE_FORMULAS = {} if GROUPED_PRODUCTS is None else {GROUPED_PRODUCTS: _of_grouped_products}
"""What torch's counter takes as its ``custom_mapping``."""


def formula_of(packet: Any) -> Callable[..., int] | None:
    """Return the formula of an operation, called with its arguments and ``out_val``; ``None`` if it has none."""
    found: Callable[..., int] | None = flop_registry.get(packet, MORE_FORMULAS.get(packet))
    return found
