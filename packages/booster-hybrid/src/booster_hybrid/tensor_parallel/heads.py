"""What modules around split layers are told of heads: how many are here, and their part of tensors with all heads."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from typing_extensions import Self

    from booster_hybrid.layer_plan import Changes


class LocalCount(int):
    """A number of heads here, by which a whole width is divided as by the number of all heads.

    Args:
        here: The number.
        everywhere: The number over all ranks.
    """

    everywhere: int

    def __new__(cls, here: int, everywhere: int) -> Self:
        """Return the number."""
        number = super().__new__(cls, here)
        number.everywhere = everywhere
        return number

    def __rfloordiv__(self, width: int) -> int:
        """Return the width of one head, from that of all ranks' heads."""
        return width // self.everywhere

    def __reduce__(self) -> tuple[type[LocalCount], tuple[int, int]]:
        """Return how a copy is made."""
        return LocalCount, (int(self), self.everywhere)


def cut_arguments(
    module: nn.Module, names: Sequence[str], cuts: Sequence[tuple[int, int]], rank: int, changes: Changes
) -> None:
    """Let a module be called with its rank's heads of some tensors, which come with all heads.

    Args:
        module: The module.
        names: The arguments; one that is ``None``, or has one head for all, stays.
        cuts: The half-open range of heads of each rank.
        rank: This rank.
        changes: Notes the hook.
    """
    positions = {name: index for index, name in enumerate(inspect.signature(module.forward).parameters)}
    num_heads = cuts[-1][1]

    def cut(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = list(args)
        for name in names:
            if name in kwargs:
                kwargs = {**kwargs, name: _own_heads(kwargs[name], num_heads, cuts[rank])}
            elif positions[name] < len(given):
                given[positions[name]] = _own_heads(given[positions[name]], num_heads, cuts[rank])
        return tuple(given), kwargs

    changes.hook(module.register_forward_pre_hook(cut, with_kwargs=True))


def _own_heads(value: Any, num_heads: int, own: tuple[int, int]) -> Any:
    """Return a range of the heads of a tensor of shape (samples, heads, ...) or (samples * heads, one, keys)."""
    if not isinstance(value, Tensor):
        return value
    first, last = own
    if value.dim() == 3:
        return value.view(-1, num_heads, *value.shape[1:])[:, first:last].flatten(0, 1)
    return value[:, first:last] if value.shape[1] == num_heads else value
