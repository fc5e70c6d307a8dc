"""`SdpaProbe`: find out before its first call whether a layer can be split along sequences.

A layer that attends by torch's function may do more with positions: rotary angles that it makes itself, masks,
convolutions. On parts of a sequence these would be wrong without an error. So the layer computes a short random
sequence, whole and in parts, in fp64: outputs and gradients must be the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from booster_core.errors import ConfigError
from booster_hybrid.probe.running import WithoutDropout

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from booster_hybrid.sequence_parallel.stack import Stack

_POSITIONS = 4
"""Positions for each rank of the sequence that is computed twice."""
_TOLERANCE = 1e-5
"""Largest difference relative to the largest value: fp64, with parts that a layer computes in fp32."""
_SEED = 20231


class SdpaProbe:
    """Checks that a layer computes the same from parts of a sequence as from the whole, on its first call.

    Args:
        layer: The layer.
        stack: What the layers share.
    """

    def __init__(self, layer: nn.Module, stack: Stack) -> None:
        self._layer, self._stack = layer, stack
        self._is_done = False

    def __call__(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> None:
        """Compute a short sequence twice, until one was long enough.

        Args:
            hidden: The layer's hidden states, of which batch and size are taken.
            args: The positional arguments after them, for whole sequences.
            kwargs: The arguments by name.
            length: Number of positions of the whole sequences.

        Raises:
            ConfigError: If the results differ, or the layer does not attend to other ranks' positions, on every rank.

        Collective: the group, until a sequence was long enough.
        """
        stack = self._stack
        if self._is_done:
            return
        # A shorter sequence shows less, so that the check is repeated.
        self._is_done = length >= _POSITIONS * stack.group.size
        short = min(_POSITIONS * stack.group.size, length)
        is_host = hidden.device.type == "cpu"
        devices: list[Any] = [] if is_host else [hidden.device]
        kept = torch.random.fork_rng(devices, device_type="cuda" if is_host else hidden.device.type)
        before = stack.length, stack.key_length, stack.num_attentions
        with kept, torch.enable_grad(), stack.probing():
            torch.manual_seed(_SEED)
            shape = (hidden.shape[0], short, hidden.shape[-1])
            states, weights = (torch.randn(shape, dtype=torch.float64, device=hidden.device) for _ in range(2))
            shortened = pytree.tree_map_only(
                torch.Tensor, lambda each: _short(each, length, short, stack.widths), (args, kwargs)
            )
            whole = self._run(states, weights, shortened, None)
            stack.enter(short)
            stack.num_attentions = 0
            try:
                found = self._run(states, weights, shortened, short)
            except CheckpointError:  # what is computed again in backward attended otherwise
                found = [torch.full_like(each, math.nan) for each in self._parts(whole, short)]
            except ConfigError:  # a `ValueError` that tells the reason
                raise
            except (RuntimeError, ValueError, IndexError) as error:
                msg = (
                    f"A '{type(self._layer).__name__}' of {stack.model_name} fails on a part of a sequence, so "
                    f"`sequence_parallelism_mode={stack.mode!r}` can't split it: {error}. It may attend by code of its "
                    "own; use 'split_gather' with `tp_size`, or leave sequences whole."
                )
                raise ConfigError(msg) from error
        length, key_length, num_attentions = before
        stack.length, stack.key_length = length, key_length
        worst = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for ours, theirs, truth in zip(found, self._parts(whole, short), whole, strict=True):
            if not ours.numel():  # fewer positions than ranks
                continue
            difference = (ours - theirs).abs().max() / truth.abs().max()
            worst = torch.maximum(worst, difference.nan_to_num(nan=1.0))
        worst = (worst > _TOLERANCE).double()
        stack.group.all_reduce(worst).wait()
        if float(worst):
            msg = (
                f"A '{type(self._layer).__name__}' of {stack.model_name} computes something else from parts of a "
                f"sequence than from the whole, so `sequence_parallelism_mode={stack.mode!r}` can't split it. Attend "
                "only by `torch.nn.functional.scaled_dot_product_attention`, and pass what depends on positions to "
                "the layer as an argument, of shape (positions, ...) or (batch, positions, ...)."
            )
            raise ConfigError(msg)
        stack.check_attention(self._layer)
        stack.num_attentions = num_attentions

    def _parts(self, whole: list[Tensor], length: int) -> list[Tensor]:
        return [self._stack.layout(length).take(each, 1, self._stack.group.rank) for each in whole]

    def _run(self, states: Tensor, weights: Tensor, more: tuple[Any, Any], split: int | None) -> list[Tensor]:
        """Return outputs of the layer, and gradients of its hidden states, whole or of this rank's part."""
        stack = self._stack
        args, kwargs = more
        if split is not None:
            layout, rank = stack.layout(split), stack.group.rank
            states, weights = layout.take(states, 1, rank), layout.take(weights, 1, rank)
            args, kwargs = stack.cut((args, kwargs), split)
        states = states.clone().requires_grad_()
        wide = {f"layer.{name}": each.detach().double() for name, each in _floating(self._layer)}
        with WithoutDropout(), torch.autocast(states.device.type, enabled=False):
            stack.is_alone = split is None
            try:
                found: list[Tensor] = torch.func.functional_call(
                    _BothPasses(self._layer), wide, (states, weights, args, kwargs)
                )
            finally:
                stack.is_alone = False
        return found


class _BothPasses(nn.Module):
    """Forward and backward of a layer as one function of its parameters, also of what is computed again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor, weights: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the outputs, and the gradients of the hidden states."""
        output = self.layer(states, *args, **kwargs)
        first = output[0] if isinstance(output, (tuple, list)) else output
        (gradient,) = torch.autograd.grad(first, states, weights)
        return [first.detach(), gradient]


def _floating(layer: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*layer.named_parameters(), *layer.named_buffers()]
    return [(name, each) for name, each in named if each.dtype.is_floating_point]


def position_dims(value: Tensor, length: int, widths: Collection[tuple[int, int]] = ()) -> list[int]:
    """Return which dimensions of an argument run over whole sequences: the first of this size, or a mask's last two.

    Args:
        value: The argument.
        length: Number of positions.
        widths: Numbers of dimensions and last sizes of arguments that are no masks, as sequences of other lengths have
            shown.
    """
    last = value.dim() - 1
    is_known = (value.dim(), value.shape[-1] if value.dim() else 0) in widths
    if last > 0 and tuple(value.shape[-2:]) == (length, length) and not is_known:
        return [last - 1, last]
    return [last] if is_of_keys(value, length) else [dim for dim, size in enumerate(value.shape) if size == length][:1]


def is_of_keys(value: Tensor, length: int) -> bool:
    """Return whether an argument is a mask of keys, alike for all queries, which attention needs whole.

    Args:
        value: The argument.
        length: Number of positions.
    """
    return value.dim() == 4 and tuple(value.shape[-2:]) == (1, length)


def _short(value: Tensor, length: int, short: int, widths: Collection[tuple[int, int]]) -> Tensor:
    """Return the beginning of what a layer is given for whole sequences, in fp64."""
    for dim in position_dims(value, length, widths):
        value = value.narrow(dim, 0, short)
    return value.double() if value.dtype.is_floating_point else value
