"""Logits of which each rank has those of its positions, and which look whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.exchange import gather_sequence
from booster_hybrid.tensor_parallel.logits import SplitLogits
from booster_hybrid.whole import (
    FACTS,
    Kept,
    asks_format,
    changes_in_place,
    check_unchanged,
    is_elementwise,
    name_of,
    on_whole,
    whole_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.sequence_parallel.layout import SequenceLayout


class SplitPositions(Tensor):
    """Logits of this rank's positions, shape ``(batch, positions, vocabulary)``, made by `split_positions`.

    Conversions and products with numbers work on the part; every other function is called on the whole, which all
    ranks of the sequence must ask for. What would write into them raises. `local` is the part here, `gather` puts the
    whole together.
    """

    _inner: Tensor
    _layout: SequenceLayout
    _sequence_group: RankGroup
    _kept: Kept | None = None

    def local(self) -> Tensor:
        """Return the logits of the positions that are here, maybe split by vocabulary."""
        return self._inner

    def gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the logits of all positions; with arguments, what `torch.Tensor.gather` picks of them.

        Collective: the sequence parallel ranks.
        """
        if args or kwargs:
            group = self._sequence_group.group
            picked: Tensor = on_whole(Tensor.gather, (self, *args), kwargs, SplitPositions, group, _whole)
            return picked
        return _whole(self)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # the same as torch's
        """Return what is here of what."""
        number = self._layout.lengths[self._sequence_group.rank]
        return f"SplitPositions({number} of {self._layout.length} positions, {self._inner!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer for the logits of all positions: from the part where that can be, else from the whole."""
        del types
        args, named, name = tuple(args), dict(kwargs or {}), name_of(func)
        leaves = pytree.tree_leaves((args, named))
        found: list[SplitPositions] = [each for each in leaves if isinstance(each, SplitPositions)]
        source = found[0]
        with DisableTorchFunctionSubclass():
            for each in found:
                check_unchanged(each._kept, "logits that are split by positions")  # noqa: SLF001 - our own, as below
            if name in FACTS or asks_format(name, args, SplitPositions):
                return func(*args, **named)
            is_alike = is_elementwise(name, args, named, source) and getattr(func, "__name__", "") != "__set__"
        if name in _SHAPES and args[0] is source:
            return _SHAPES[name](source._whole_shape(), *(args[1:] if name == "size" else ()), **named)  # noqa: SLF001
        if is_alike and not name.endswith("_"):
            inner_args, inner_named = pytree.tree_map_only(SplitPositions, SplitPositions.local, (args, named))
            return split_positions(func(*inner_args, **inner_named), source._layout, source._sequence_group)  # noqa: SLF001
        if changes_in_place(func, args, named, SplitPositions):
            msg = (
                f"`{name}` would write into logits of {source._layout.lengths[source._sequence_group.rank]} of "  # noqa: SLF001
                f"{source._layout.length} positions, which `parallel_output=True` leaves split. Write into "  # noqa: SLF001
                "`logits.gather()`, the whole, or pass `parallel_output=False`."
            )
            raise ConfigError(msg)
        return on_whole(func, args, named, SplitPositions, source._sequence_group.group, _whole)  # noqa: SLF001

    def _whole_shape(self) -> torch.Size:
        first, _, *rest = self._inner.shape
        return torch.Size((first, self._layout.length, *rest))


def split_positions(local: Tensor, layout: SequenceLayout, group: RankGroup) -> Tensor:
    """Return logits of some positions that answer for all.

    Args:
        local: Shape ``(batch, local positions, vocabulary)``, maybe split by vocabulary.
        layout: Who has which positions.
        group: The sequence parallel ranks.
    """
    with DisableTorchFunctionSubclass():
        logits = local.as_subclass(SplitPositions)
    logits._inner, logits._layout, logits._sequence_group = local, layout, group  # noqa: SLF001 - made here
    return logits


def _whole(source: SplitPositions) -> Tensor:
    """Return the logits of all positions, which are put together once for all that asks for them."""
    inner, layout, group = source._inner, source._layout, source._sequence_group  # noqa: SLF001 - our own

    def gather() -> Tensor:
        if isinstance(inner, SplitLogits):
            return inner.alike(gather_sequence(inner.local(), layout, group))
        return gather_sequence(inner, layout, group)

    kept = whole_of(source._kept, inner, gather)  # noqa: SLF001
    source._kept = kept  # noqa: SLF001
    return kept.tensor


_SHAPES: dict[str, Callable[..., Any]] = {
    "shape": lambda shape: shape,
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
    "numel": torch.Size.numel,
    "nelement": torch.Size.numel,
    "__len__": lambda shape: shape[0],
}
