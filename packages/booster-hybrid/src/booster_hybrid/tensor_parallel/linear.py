"""Column- and row-parallel linear layers on local weights, in the forms of ``nn.Linear`` and transformers' ``Conv1D``.

A column-parallel layer holds some of the outputs, a row-parallel one some of the inputs; the pair needs one sum in
forward (after the row) and one in backward (before the column). Column-parallel siblings that read the same input, such
as q, k and v, share that backward sum, and it travels while the weights' gradients are computed.

Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core import collectives
from booster_hybrid.tensor_parallel.collectives import gather_last, refuse_second_derivative, scatter_last
from booster_hybrid.tensor_parallel.eager import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.tensor_parallel.group import TensorGroup


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer keeps its weight as (inputs, outputs), as transformers' ``Conv1D`` does."""
    return not isinstance(module, nn.Linear)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes a plain linear map, in either storage order."""
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return isinstance(module, nn.Linear)
    # Both compute the plain map, in code of their own.
    return kind.__name__ in ("Conv1D", "FalconLinear") and kind.__module__.startswith("transformers.")


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _weight_gradient(row: Tensor, flat: Tensor, dtype: torch.dtype, *, is_transposed: bool) -> Tensor:
    return ((flat.t() @ row) if is_transposed else (row.t() @ flat)).to(dtype)


class _Columns(torch.autograd.Function):
    """Several column-parallel products of one input, with one sum over ranks of the input's gradient.

    Only what backward will need is kept: frozen weights don't keep the input alive.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        siblings: ColumnSiblings,
        *weights_and_biases: Tensor | None,
    ) -> tuple[Tensor, ...]:
        half = len(weights_and_biases) // 2
        weights: list[Any] = list(weights_and_biases[:half])
        biases: list[Any] = list(weights_and_biases[half:])
        needs_source, _, *needs = ctx.needs_input_grad
        ctx.set_materialize_grads(False)  # a sibling that was not used has no gradient, and costs nothing
        ctx.siblings, ctx.shape, ctx.dtype = siblings, source.shape, source.dtype
        ctx.dtypes = [None if each is None else each.dtype for each in (*weights, *biases)]
        device_type = source.device.type
        dtype = _autocast_dtype(device_type)
        if dtype is not None:
            source = source.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
            biases = [None if bias is None else bias.to(dtype) for bias in biases]
        ctx.save_for_backward(
            source if any(needs[:half]) else None, *(weight if needs_source else None for weight in weights)
        )
        with torch.autocast(device_type, enabled=False):
            return tuple(
                nn.functional.linear(source, weight.t() if siblings.is_transposed else weight, bias)
                for weight, bias in zip(weights, biases, strict=True)
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        siblings: ColumnSiblings = ctx.siblings
        siblings.forget()  # backward has come this far: nobody will fetch the rest
        source, *weights = ctx.saved_tensors
        needs_source, _, *needs = ctx.needs_input_grad
        rows = [None if each is None else each.reshape(-1, each.shape[-1]) for each in gradients]
        pending, total = None, None
        if needs_source:
            for row, weight in zip(rows, weights, strict=True):
                if row is not None:
                    factor = weight.t() if siblings.is_transposed else weight
                    total = row @ factor if total is None else total.addmm_(row, factor)
        if total is not None:
            pending = collectives.all_reduce(total, group=siblings.group.group)
        flat = None if source is None else source.reshape(-1, source.shape[-1])
        half = len(rows)
        of_weights = [
            _weight_gradient(row, flat, dtype, is_transposed=siblings.is_transposed)
            if wanted and row is not None and flat is not None
            else None
            for row, wanted, dtype in zip(rows, needs[:half], ctx.dtypes[:half], strict=True)
        ]
        of_biases = [
            row.sum(0, dtype=dtype) if wanted and row is not None else None
            for row, wanted, dtype in zip(rows, needs[half:], ctx.dtypes[half:], strict=True)
        ]
        of_source = None
        if pending is not None and total is not None:
            pending.wait()
            of_source = total.view(ctx.shape).to(ctx.dtype)
        return (of_source, None, *of_weights, *of_biases)


@dataclass(frozen=True)
class _Kept:
    """A layer's outputs that it has not asked for yet, and what they were computed from."""

    outputs: Tensor
    parameters: tuple[Tensor | None, ...]
    versions: tuple[int, ...]

    def is_of(self, parameters: tuple[Tensor | None, ...]) -> bool:
        """Whether they were computed from these parameters, as they are now."""
        is_same = all(one is other for one, other in zip(self.parameters, parameters, strict=True))
        return is_same and self.versions == tuple(map(_version, parameters))


class ColumnSiblings:
    """Column-parallel layers that may read one input; the first that is called computes for all of them.

    Args:
        modules: The layers, all in one storage order.
        group: The tensor parallel ranks.

    Attributes:
        group: The tensor parallel ranks.
        is_transposed: Whether the weights are stored as (inputs, outputs).

    Results that no sibling has fetched are dropped when another input comes, in backward, or by `forget`; whose
    results went to waste is not computed along again, such as the queries of an attention that reads its keys
    elsewhere.
    """

    def __init__(self, modules: Sequence[nn.Module], group: TensorGroup) -> None:
        self.group = group
        self.is_transposed = is_transposed(modules[0])
        self._along: dict[nn.Module, list[Any]] = {module: list(modules) for module in modules}
        self._source: Tensor | None = None
        self._asked_first: nn.Module | None = None
        self._state: tuple[Any, ...] = ()
        self._kept: dict[nn.Module, _Kept] = {}

    def __call__(self, module: nn.Module, source: Tensor) -> Tensor:
        """Return one layer's outputs.

        Args:
            module: One of the siblings.
            source: Shape ``(..., inputs)``, the same on every rank.

        Returns:
            Shape ``(..., local outputs)``.

        Collective: the group, in backward.
        """
        if not torch.is_grad_enabled():  # nothing is shared without backward
            weight: Any = module.weight
            bias: Any = module.bias
            return nn.functional.linear(source, weight.t() if self.is_transposed else weight, bias)
        state = (_version(source), _autocast_dtype(source.device.type))
        if self._source is source and self._state == state:
            kept = self._kept.pop(module, None)
            if kept is not None and kept.is_of(_parameters(module)):
                if not self._kept:
                    self.forget()
                return kept.outputs
        return self._computed(module, source, state)

    def forget(self) -> None:
        """Drop what no sibling has fetched, and compute it no more where the same sibling asks first."""
        if self._asked_first is not None and self._kept:
            along = self._along[self._asked_first]
            self._along[self._asked_first] = [module for module in along if module not in self._kept]
        self._source, self._asked_first, self._kept = None, None, {}

    def _computed(self, module: nn.Module, source: Tensor, state: tuple[Any, ...]) -> Tensor:
        self.forget()
        along = self._along[module]
        parameters = [_parameters(each) for each in along]
        flat = (*(weight for weight, _ in parameters), *(bias for _, bias in parameters))
        outputs: tuple[Tensor, ...] = _Columns.apply(source, self, *flat)  # type: ignore[no-untyped-call]
        kept = {
            each: _Kept(output, own, tuple(map(_version, own)))
            for each, output, own in zip(along, outputs, parameters, strict=True)
        }
        result = kept.pop(module).outputs
        if kept:
            self._source, self._asked_first, self._state, self._kept = source, module, state, kept
        return result


def _parameters(module: Any) -> tuple[Tensor, Tensor | None]:
    return module.weight, module.bias


def _version(tensor: Tensor | None) -> int:
    """Return a number that grows when a tensor is written to; those made in inference mode count nothing."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 - no other way


class ColumnForward:
    """The forward of a column-parallel layer.

    Args:
        module: The layer, with its local weight.
        siblings: The layers that read its input, itself among them.
        gathers: Lengths of the ranks' outputs where they are to be put together; ``None`` leaves them split.
        group: The tensor parallel ranks.

    Attributes:
        siblings: As above.
        gathers: As above.
    """

    def __init__(
        self, module: nn.Module, siblings: ColumnSiblings, group: TensorGroup, gathers: Sequence[int] | None = None
    ) -> None:
        self._module, self._group = module, group
        self.siblings, self.gathers = siblings, gathers

    @outside_of_graphs
    def __call__(self, source: Tensor) -> Tensor:
        outputs = self.siblings(self._module, source)
        return outputs if self.gathers is None else gather_last(outputs, self.gathers, self._group)


class _Row(torch.autograd.Function):
    """A row-parallel product, whose partial results are summed in place; the first rank's has the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: TensorGroup,
        transposed: bool,  # noqa: FBT001 - autograd functions take no keywords
    ) -> Tensor:
        needs_source, needs_weight, *_ = ctx.needs_input_grad
        ctx.is_transposed, ctx.shape = transposed, source.shape
        ctx.dtypes = source.dtype, weight.dtype, None if bias is None else bias.dtype
        device_type = source.device.type
        dtype = _autocast_dtype(device_type)
        if dtype is not None:
            source, weight = source.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(source if needs_weight else None, weight if needs_source else None)
        with torch.autocast(device_type, enabled=False):
            outputs = nn.functional.linear(
                source, weight.t() if transposed else weight, bias if group.rank == 0 else None
            ).contiguous()
        collectives.all_reduce(outputs, group=group.group).wait()
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        source, weight = ctx.saved_tensors
        row = gradient.reshape(-1, gradient.shape[-1])
        of_source, of_weight, of_bias = None, None, None
        of_dtype, weight_dtype, bias_dtype = ctx.dtypes
        if weight is not None:
            of_source = (row @ (weight.t() if ctx.is_transposed else weight)).view(ctx.shape).to(of_dtype)
        if source is not None:
            flat = source.reshape(-1, source.shape[-1])
            of_weight = _weight_gradient(row, flat, weight_dtype, is_transposed=ctx.is_transposed)
        if ctx.needs_input_grad[2]:
            of_bias = row.sum(0, dtype=bias_dtype)
        return of_source, of_weight, of_bias, None, None


class RowForward:
    """The forward of a row-parallel layer.

    Args:
        module: The layer, with its local weight and its whole bias.
        group: The tensor parallel ranks.
        splits: Lengths of the ranks' inputs where these come whole; ``None`` where they come split.

    Attributes:
        splits: As above.
    """

    def __init__(self, module: nn.Module, group: TensorGroup, splits: Sequence[int] | None = None) -> None:
        self._module, self._group, self.splits = module, group, splits

    @outside_of_graphs
    def __call__(self, source: Tensor) -> Tensor:
        if self.splits is not None:
            source = scatter_last(source, self.splits, self._group)
        module: Any = self._module
        outputs: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
            source, module.weight, module.bias, self._group, is_transposed(module)
        )
        return outputs
