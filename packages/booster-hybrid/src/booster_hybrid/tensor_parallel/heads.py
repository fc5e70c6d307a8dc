"""What modules around split layers are told: how wide their input is here, and their part of tensors with all heads."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from booster_hybrid.modules import ModulePatches
    from booster_hybrid.tensor_parallel.split import Split


def narrow_input(module: nn.Module, width: int, here: int, changes: ModulePatches) -> None:
    """Let a module see its first tensor as wide as what is here; split layers in it `read_real`.

    The module takes widths from its input, as in ``B, T, C = x.size()``, of what is split by then. What it gets has no
    values: whoever computes with it gets no numbers, which the proof at `boost` finds. A hook that the user registers
    on the module after `boost` sees it as well.

    Args:
        module: The module.
        width: Length of the tensor's last dimension.
        here: What the module is told of it.
        changes: Notes the hook.
    """

    def narrow(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [*args, *kwargs.values()]
        place = next((index for index, each in enumerate(given) if isinstance(each, Tensor)), None)
        if place is not None and given[place].shape[-1:] == (width,):
            real: Tensor = given[place]
            narrowed: Any = real.new_full((), math.nan).expand(*real.shape[:-1], here)
            narrowed.booster_real = real  # a list of real ones would not know which a layer in a checkpoint reads again
            given[place] = narrowed
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    changes.hook(module.register_forward_pre_hook(narrow, with_kwargs=True))


def read_real(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a layer the real tensor in place of the narrow one; a hook before its forward."""
    return tuple(getattr(each, "booster_real", each) for each in args)


class OwnHeads:
    """The forward of a part of a layer that mixes positions, with this rank's heads.

    Its buffers stay whole, as files have them, and are cut for each forward. In training some parts look for a kernel
    that computes all of them, with the weight of their last layer, whose results would not be summed: the part itself
    runs as if it were not training, which nothing else in it asks.

    Args:
        module: The part.
        splits: Which part of its buffers is used here, by name.
    """

    def __init__(self, module: nn.Module, splits: Mapping[str, Split]) -> None:
        self._module, self._splits = module, splits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        buffers, training = module._buffers, module.training  # noqa: SLF001 - `setattr` may register them anew
        whole = {name: buffers[name] for name in self._splits}
        try:
            module.training = False
            for name, split in self._splits.items():
                value = whole[name]
                buffers[name] = None if value is None else split.take(value)
            return type(module).forward(module, *args, **kwargs)
        finally:
            module.training = training
            buffers.update(whole)


def cut_arguments(
    module: nn.Module, names: Sequence[str], cuts: Sequence[tuple[int, int]], rank: int, changes: ModulePatches
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
