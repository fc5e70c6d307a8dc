"""Logits of which each rank has those of its positions, where a causal language model takes its own loss of them.

In a call with labels the loss is taken inside of the model, part by part: the head works on this rank's positions, and
the whole logits need not exist. What the model returns as its logits looks whole all the same (`SplitPositions`):
whoever asks for more than the part that is here gets the whole. Without labels, every rank's logits are whole.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_hybrid.sequence_parallel.exchange import gather_sequence
from booster_hybrid.sequence_parallel.loss import SequenceLoss
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

    from torch import nn

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


def head_of(model: nn.Module) -> nn.Module | None:
    """Return what makes logits of hidden states in a model of transformers; ``None`` where there is no such module."""
    getter: Any = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = None if getter is None else getter()
    return head


class LogitsOfPositions:
    """Lets the head and the loss of a causal language model work on this rank's positions, in calls with labels.

    Args:
        model: The user's model.
        layout_for: Returns how a sequence of a length is split.
        group: The sequence parallel ranks.
    """

    def __init__(self, model: nn.Module, layout_for: Callable[[int], SequenceLayout], group: RankGroup) -> None:
        self._layout_for, self._group = layout_for, group
        self._names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
        self._length: int | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._mark)
        head: Any = head_of(model)
        head.register_forward_pre_hook(self._take)
        model.loss_function = SequenceLoss(layout_for, group, lambda: self._length is not None)  # type: ignore[assignment]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        labels: Any = given.get("labels")
        # The compiler of a whole model takes the shape of split logits for that of their memory.
        is_whole = labels is None or torch.compiler.is_compiling()
        self._length = None if is_whole else labels.shape[1]
        kept = given.get("logits_to_keep", 0)
        if not is_whole and (not isinstance(kept, int) or kept):
            msg = (
                f"`logits_to_keep={kept}` counts positions of the whole sequence. Leave it out, or "
                "`parallel_output=False`."
            )
            raise ConfigError(msg)

    def _take(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Give the head the hidden states of the positions that are here."""
        del module
        if self._length is None:
            return args
        return (self._layout_for(self._length).take(args[0], 1, self._group.rank), *args[1:])

    def _mark(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Let the logits that the model returns know which part they are."""
        del module, args
        if self._length is None:
            return outputs
        layout = self._layout_for(self._length)
        if isinstance(outputs, tuple):  # the loss comes first
            return (outputs[0], split_positions(outputs[1], layout, self._group), *outputs[2:])
        outputs.logits = split_positions(outputs.logits, layout, self._group)
        return outputs
