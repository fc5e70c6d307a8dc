"""Outputs of the right shapes for modules that a stage does not have to run, as none of their values is used there.

A module is run once on fake tensors for each set of shapes that it is called with. Where its forward reads values,
those of integers decide (the sizes of images, say), so that they are real then, and a part of what is remembered.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from booster_hybrid.pipeline.trace import at_every_place, quiet_fakes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MOST_KNOWN = 256
"""Sets of shapes that are remembered for each module."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type(Ellipsis))


def is_plain(leaf: Any) -> bool:
    """Return whether something in a call's arguments or results is a tensor, or can't change."""
    return isinstance(leaf, (torch.Tensor, *_PLAIN))


class UnknownShapeError(Exception):
    """The shapes of a module's outputs can't be told without running it."""


class EmptyOutputs:
    """Tells what a module would return, but for the values, which are zeros.

    Args:
        module: The module, without collectives in its forward.
        forward: That forward.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward
        self._known: dict[Any, tuple[list[Any], pytree.TreeSpec]] = {}
        self._reads_integers = False
        self._is_unknown = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call of the module would return, without gradients.

        Raises:
            UnknownShapeError: If that can't be told. It is not tried again.
        """
        leaves, form = pytree.tree_flatten((args, dict(kwargs)))
        if self._is_unknown or not all(map(is_plain, leaves)):
            raise UnknownShapeError
        found = self._known.get(self._key(leaves, form))
        if found is None:
            found = self._find(leaves, form)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[self._key(leaves, form)] = found
        return pytree.tree_unflatten([each() if isinstance(each, _Zeros) else each for each in found[0]], found[1])

    def _key(self, leaves: list[Any], form: pytree.TreeSpec) -> Any:
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return repr(form), casts, self._module.training, *map(self._of_leaf, leaves)

    def _of_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), repr(leaf)
        shape = tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride()
        return (*shape, tuple(leaf.flatten().tolist())) if self._reads_integers and not _is_real(leaf) else shape

    def _find(self, leaves: list[Any], form: pytree.TreeSpec) -> tuple[list[Any], pytree.TreeSpec]:
        for reads in (False, True)[self._reads_integers :]:
            try:
                found = self._run_dry(leaves, form, reads_integers=reads)
            except Exception:  # noqa: BLE001, S112 - a value was asked for
                continue
            self._reads_integers = reads
            return found
        self._is_unknown = True
        raise UnknownShapeError

    def _run_dry(
        self, leaves: list[Any], form: pytree.TreeSpec, *, reads_integers: bool
    ) -> tuple[list[Any], pytree.TreeSpec]:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            quiet_fakes(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            fake = [
                mode.from_tensor(leaf.detach())
                if isinstance(leaf, torch.Tensor) and (_is_real(leaf) or not reads_integers)
                else leaf
                for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(fake, form)
            around = _Around(self._module, self._forward)
            # Buffers that forward writes to are left as they are.
            state: dict[str, torch.Tensor] = {}
            for name, each in _state(around):
                state[name] = mode.from_tensor(each.detach())
            state = at_every_place(around, state)
            with _RealIntegers() if reads_integers else contextlib.nullcontext():  # type: ignore[no-untyped-call]
                output = torch.func.functional_call(around, state, args, kwargs, tie_weights=False)
            results, made = pytree.tree_flatten(output)
            if not all(map(is_plain, results)):
                raise UnknownShapeError
            return [_Zeros(each) if isinstance(each, torch.Tensor) else each for each in results], made


class _Around(nn.Module):
    """Calls a module's own forward, whatever has been put in its place."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's forward returns."""
        return self.call(*args, **kwargs)


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class _Zeros:
    """Makes tensors of a format; strides are kept, as some models make views."""

    def __init__(self, like: torch.Tensor) -> None:
        self._shape, self._stride = tuple(like.shape), like.stride()
        self._dtype, self._device = like.dtype, like.device

    def __call__(self) -> torch.Tensor:
        spans = [(size - 1) * step for size, step in zip(self._shape, self._stride, strict=True)]
        numel = 1 + sum(spans) if all(self._shape) else 0
        return torch.zeros(numel, dtype=self._dtype, device=self._device).as_strided(self._shape, self._stride)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes with integers in earnest, where nothing that they are computed from is fake."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on real integers, or leave it to the mode below."""
        del types
        kwargs = kwargs or {}
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(each, FakeTensor) or _is_real(each) for each in inputs):
            return func(*args, **kwargs)
        with _disable_current_modes():
            output = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        return func(*args, **kwargs) if any(map(_is_real, results)) else output
