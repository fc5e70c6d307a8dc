"""The second half of `check_policy`: gradients of a layer that computes the same outputs whole and split.

Outputs don't show what becomes of a parameter that is whole on every rank but works on split activations, such as a
norm of each head: its gradient is a part on each rank until it is summed.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_hybrid.tensor_parallel.rehearsal import RehearsedRank, rehearse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from booster_hybrid.tensor_parallel.apply import TensorParallelModel

_TOLERANCE = 1e-3
"""Largest difference, relative to the largest gradient of the tensor."""
_SMALL = 1e-2
"""Tensors with smaller gradients than this part of the largest are measured against it: they may be roundings."""
_SEED = 20192
_INPUT = "(hidden states)"


class NoGradientError(Exception):
    """A layer has no gradients to compare; the message says why."""


def differing_gradient(
    layer: nn.Module,
    parts: Sequence[nn.Module],
    values: tuple[Mapping[str, Tensor], Sequence[Mapping[str, Tensor]], Mapping[str, Tensor]],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    ranks: Sequence[RehearsedRank],
    splits: Sequence[TensorParallelModel],
    names: Mapping[str, str],
) -> str | None:
    """Return what gradient differs where a layer is split, and by how much; ``None`` where none does.

    Args:
        layer: The whole layer, without values.
        parts: Each rank's.
        values: Parameters of the layer, those of each rank's part, and buffers, by their names in it.
        call: What the layer is called with.
        ranks: The ranks.
        splits: What became of each rank's parameters.
        names: Names in the model of the layer's parameters.

    Raises:
        NoGradientError: If the layer has none.
    """
    parameters, local, buffers = values
    try:
        expected = _gradients(layer, parameters, buffers, call)[1]
    except Exception as error:
        msg = f"its outputs agree, but its gradients could not be compared ({type(error).__name__}: {error})"
        raise NoGradientError(msg) from error
    found: dict[int, dict[str, Tensor]] = {}

    def run(rank: int) -> Tensor:
        output, found[rank] = _gradients(parts[rank], local[rank], buffers, call)
        return output

    try:
        rehearse(ranks, run)
    except Exception as error:  # noqa: BLE001 - whatever a layer raises that is split
        return f"backward of the split layer fails with {type(error).__name__}: {error}"
    largest = max((float(each.abs().max()) for each in expected.values() if each.numel()), default=0.0)
    for name, wanted in expected.items():
        own = [found[rank.rank][name] for rank in ranks]
        for gradient in _completed(own, names.get(name, name), splits):
            difference = float((gradient - wanted).abs().max()) if gradient.numel() else 0.0
            scale = float(wanted.abs().max()) if wanted.numel() else 0.0
            if not difference <= _TOLERANCE * max(scale, _SMALL * largest):
                return f"the gradient of '{name}' of up to {scale:.3g} differs by up to {difference:.3g}"
    return None


def _completed(own: Sequence[Tensor], name: str, splits: Sequence[TensorParallelModel]) -> list[Tensor]:
    """Return the gradient of a whole parameter that each rank ends up with, or all together do."""
    if name in splits[0].splits:
        parts = [each.splits[name].spread(part, owned_only=True) for each, part in zip(splits, own, strict=True)]
        return [torch.stack(parts).sum(0)]
    return list(own)


def _gradients(
    layer: nn.Module,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    call: tuple[tuple[Any, ...], dict[str, Any]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a layer's outputs, and the gradients of its parameters and hidden states of their weighted sum."""
    args, kwargs = copy.deepcopy(call)
    with torch.enable_grad():
        leaves = {name: each.detach().clone().requires_grad_() for name, each in parameters.items()}
        state = {**leaves, **{name: buffer.clone() for name, buffer in buffers.items()}}
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.is_floating_point():
            leaves[_INPUT] = hidden.detach().clone().requires_grad_()
            if args:
                args = (leaves[_INPUT], *args[1:])
            else:
                kwargs = {**kwargs, "hidden_states": leaves[_INPUT]}
        outputs = torch.func.functional_call(layer, state, args, kwargs)
        output = next(each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor))
        generator = torch.Generator(output.device).manual_seed(_SEED)
        weights = torch.randn(output.shape, generator=generator, device=output.device)
        gradients = torch.autograd.grad(output, [*leaves.values()], weights, allow_unused=True)
    pairs = zip(leaves.items(), gradients, strict=True)
    return output.detach(), {name: torch.zeros_like(leaf) if each is None else each for (name, leaf), each in pairs}
