"""Column- and row-parallel linear layers on local weights, in the forms of ``nn.Linear`` and transformers' ``Conv1D``.

A column-parallel layer holds some of the outputs, a row-parallel one some of the inputs; the pair needs one sum in
forward (after the row) and one in backward (before the column). Column-parallel siblings that read the same input, such
as q, k and v, share that backward sum, and it travels while the weights' gradients are computed.

Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core import collectives
from booster_hybrid.tensor_parallel.collectives import gather_last, scatter_last

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


class _Columns(torch.autograd.Function):
    """Several column-parallel products of one input, with one sum over ranks of the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        group: TensorGroup,
        transposed: bool,  # noqa: FBT001 - autograd functions take no keywords
        *weights_and_biases: Tensor | None,
    ) -> tuple[Tensor, ...]:
        half = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:half], weights_and_biases[half:]
        ctx.group, ctx.transposed = group, transposed
        ctx.dtypes = [source.dtype, *(weight.dtype for weight in weights if weight is not None)]
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        device_type = source.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            source = source.to(dtype)
            weights = tuple(weight.to(dtype) for weight in weights if weight is not None)
            biases = tuple(None if bias is None else bias.to(dtype) for bias in biases)
        ctx.save_for_backward(source, *weights)
        with torch.autocast(device_type, enabled=False):
            return tuple(
                nn.functional.linear(source, weight.t() if transposed else weight, bias)
                for weight, bias in zip(weights, biases, strict=True)
                if weight is not None
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        source, *weights = ctx.saved_tensors
        needs_source, _, _, *needs = ctx.needs_input_grad
        rows = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        pending, total = None, None
        if needs_source:
            for row, weight in zip(rows, weights, strict=True):
                factor = weight.t() if ctx.transposed else weight
                total = row @ factor if total is None else torch.addmm(total, row, factor)
            pending = collectives.all_reduce(total, group=ctx.group.group)  # type: ignore[arg-type]
        flat = source.reshape(-1, source.shape[-1])
        of_weights = [
            ((flat.t() @ row) if ctx.transposed else (row.t() @ flat)).to(dtype) if wanted else None
            for row, wanted, dtype in zip(rows, needs[: len(weights)], ctx.dtypes[1:], strict=True)
        ]
        of_biases = [
            row.sum(0).to(dtype) if wanted else None
            for row, wanted, dtype in zip(rows, needs[len(weights) :], ctx.bias_dtypes, strict=True)
        ]
        of_source = None
        if pending is not None and total is not None:
            pending.wait()
            of_source = total.view(source.shape).to(ctx.dtypes[0])
        return (of_source, None, None, *of_weights, *of_biases)


class ColumnSiblings:
    """Column-parallel layers that may read one input; the first that is called computes for all of them.

    Args:
        modules: The layers, all in one storage order.
        group: The tensor parallel ranks.

    Results that no sibling has fetched are dropped when another input comes, or by `forget`.
    """

    def __init__(self, modules: Sequence[nn.Module], group: TensorGroup) -> None:
        self._modules = list(modules)
        self._group = group
        self._transposed = is_transposed(self._modules[0])
        self._source: Tensor | None = None
        self._is_recording = False
        self._results: dict[int, Tensor] = {}

    def __call__(self, module: nn.Module, source: Tensor) -> Tensor:
        """Return one layer's outputs.

        Args:
            module: One of the siblings.
            source: Shape ``(..., inputs)``, the same on every rank.

        Returns:
            Shape ``(..., local outputs)``.

        Collective: the group, in backward.
        """
        key = id(module)
        is_same = self._source is source and self._is_recording == torch.is_grad_enabled()
        if not (is_same and key in self._results):
            self._source, self._is_recording = source, torch.is_grad_enabled()
            weights = [each.weight for each in self._modules]
            biases = [each.bias for each in self._modules]
            outputs: tuple[Tensor, ...] = _Columns.apply(  # type: ignore[no-untyped-call]
                source, self._group, self._transposed, *weights, *biases
            )
            self._results = dict(zip(map(id, self._modules), outputs, strict=True))
        result = self._results.pop(key)
        if not self._results:
            self._source = None
        return result

    def forget(self) -> None:
        """Drop what no sibling has fetched."""
        self._source = None
        self._results = {}


class ColumnForward:
    """The forward of a column-parallel layer.

    Args:
        module: The layer, with its local weight.
        siblings: The layers that read its input, itself among them.
        gathers: Lengths of the ranks' outputs where they are to be put together; ``None`` leaves them split.
        group: The tensor parallel ranks.
    """

    def __init__(
        self, module: nn.Module, siblings: ColumnSiblings, group: TensorGroup, gathers: Sequence[int] | None = None
    ) -> None:
        self._module, self._siblings, self._group, self._gathers = module, siblings, group, gathers

    def __call__(self, source: Tensor) -> Tensor:
        outputs = self._siblings(self._module, source)
        return outputs if self._gathers is None else gather_last(outputs, self._gathers, self._group)


class _Row(torch.autograd.Function):
    """A row-parallel product, whose partial results are summed in place."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        group: TensorGroup,
        transposed: bool,  # noqa: FBT001 - autograd functions take no keywords
    ) -> Tensor:
        ctx.transposed, ctx.dtypes = transposed, (source.dtype, weight.dtype)
        device_type = source.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            source, weight = source.to(dtype), weight.to(dtype)
        ctx.save_for_backward(source, weight)
        with torch.autocast(device_type, enabled=False):
            outputs = nn.functional.linear(source, weight.t() if transposed else weight)
        collectives.all_reduce(outputs, group=group.group).wait()
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        source, weight = ctx.saved_tensors
        row = gradient.reshape(-1, gradient.shape[-1])
        flat = source.reshape(-1, source.shape[-1])
        of_source, of_weight = None, None
        if ctx.needs_input_grad[0]:
            of_source = (row @ (weight.t() if ctx.transposed else weight)).view(source.shape).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_weight = ((flat.t() @ row) if ctx.transposed else (row.t() @ flat)).to(ctx.dtypes[1])
        return of_source, of_weight, None, None


class RowForward:
    """The forward of a row-parallel layer.

    Args:
        module: The layer, with its local weight and its whole bias.
        group: The tensor parallel ranks.
        splits: Lengths of the ranks' inputs where these come whole; ``None`` where they come split.
    """

    def __init__(self, module: nn.Module, group: TensorGroup, splits: Sequence[int] | None = None) -> None:
        self._module, self._group, self._splits = module, group, splits

    def __call__(self, source: Tensor) -> Tensor:
        if self._splits is not None:
            source = scatter_last(source, self._splits, self._group)
        module: Any = self._module
        outputs: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
            source, module.weight, self._group, is_transposed(module)
        )
        return outputs if module.bias is None else outputs + module.bias.to(outputs.dtype)
