"""Column- and row-parallel linear layers on local weights, in the forms of ``nn.Linear`` and transformers' ``Conv1D``.

A column-parallel layer holds some of the outputs, a row-parallel one some of the inputs; the pair needs one sum in
forward (after the row) and one in backward (before the column). Column-parallel siblings that read the same input, such
as q, k and v, share that backward sum, and it travels while the weights' gradients are computed.

Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from booster_hybrid.rank_group import AloneRank
from booster_hybrid.tensor_parallel.collectives import (
    enter,
    gather_last,
    leave,
    not_a_view,
    refuse_second_derivative,
    scatter_last,
)
from booster_hybrid.tensor_parallel.summed_gradients import used
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.pipeline.weight_gradients import SplitBackward, Waiting
    from booster_hybrid.rank_group import RankGroup
    from booster_hybrid.tensor_parallel.split import Split
    from booster_hybrid.tensor_parallel.vocabulary import ByVocabulary


_PLAIN = ("Conv1D", "FalconLinear")
"""Classes of transformers with code of their own for a plain linear map; the first one's weight is transposed."""


def is_transposed(module: Any) -> bool:
    """Return whether a linear layer keeps its weight as (inputs, outputs), as transformers' ``Conv1D`` does."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return False
    return type(module).__name__ == _PLAIN[0] or (module.bias is not None and len(module.bias) != len(module.weight))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is known to compute a plain linear map of its parameters, in either storage order."""
    kind, own = type(module), module._parameters  # noqa: SLF001 - a computed weight is none of its parameters
    if own.get("weight") is None:
        return False
    is_torchs = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward
    return is_torchs or (kind.__name__ in _PLAIN and kind.__module__.startswith("transformers."))


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _weight_gradient(row: Tensor, flat: Tensor, dtype: torch.dtype, *, is_transposed: bool) -> Tensor:
    return ((flat.t() @ row) if is_transposed else (row.t() @ flat)).to(dtype)


def _of_weight(row: Any, flat: Any, dtype: torch.dtype, *, is_transposed: bool) -> Callable[[], Tensor]:
    """Return what computes a weight's gradient, from that of the outputs and the inputs."""
    return lambda: _weight_gradient(row, flat, dtype, is_transposed=is_transposed)


def _of_bias(row: Any, dtype: torch.dtype | None) -> Callable[[], Tensor]:
    return lambda: row.sum(0, dtype=dtype)


def _waits(waiting: Waiting | None, index: int) -> bool:
    return waiting is not None and index in waiting.indices


def _now_or_later(
    product: Callable[[], Tensor], waiting: Waiting | None, index: int, *, is_wanted: bool
) -> Tensor | None:
    """Return a parameter's gradient for autograd, or defer it where it waits."""
    if waiting is not None and waiting.defer(index, product):
        return None
    return product() if is_wanted else None


class _Columns(torch.autograd.Function):
    """Several column-parallel products of one input, with one sum over ranks of the input's gradient.

    Only what backward will need is kept: frozen weights don't keep the input alive, and of an input that was gathered
    this rank's part is kept, and gathered again while the input's gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        siblings: ColumnSiblings,
        waiting: Waiting | None,
        gathered: GatheredInput | None,
        *weights_and_biases: Tensor | None,
    ) -> tuple[Tensor, ...]:
        half = len(weights_and_biases) // 2
        weights: list[Any] = list(weights_and_biases[:half])
        biases: list[Any] = list(weights_and_biases[half:])
        needs_source, _, _, _, *needs = ctx.needs_input_grad
        ctx.waiting, ctx.gathered = waiting, gathered
        ctx.set_materialize_grads(False)  # a sibling that was not used has no gradient, and costs nothing
        ctx.siblings, ctx.shape, ctx.dtype = siblings, source.shape, source.dtype
        ctx.dtypes = [None if each is None else each.dtype for each in (*weights, *biases)]
        device_type = source.device.type
        dtype = ctx.product_dtype = _autocast_dtype(device_type)
        if dtype is not None:
            source = source.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
            biases = [None if bias is None else bias.to(dtype) for bias in biases]
        keeps_source = any(needs[:half]) or any(_waits(waiting, index) for index in range(half))
        kept = source if gathered is None else gathered.part()
        ctx.save_for_backward(kept if keeps_source else None, *(weight if needs_source else None for weight in weights))
        with torch.autocast(device_type, enabled=False):
            return tuple(
                not_a_view(nn.functional.linear(source, weight.t() if siblings.is_transposed else weight, bias))
                for weight, bias in zip(weights, biases, strict=True)
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        siblings: ColumnSiblings = ctx.siblings
        siblings.forget()  # backward has come this far: nobody will fetch the rest
        source, *weights = ctx.saved_tensors
        needs_source, _, _, _, *needs = ctx.needs_input_grad
        coming = None if source is None or ctx.gathered is None else ctx.gathered.again(source)
        rows = [None if each is None else each.reshape(-1, each.shape[-1]) for each in gradients]
        pending, total = None, None
        if needs_source:
            for row, weight in zip(rows, weights, strict=True):
                if row is not None:
                    factor = weight.t() if siblings.is_transposed else weight
                    total = row @ factor if total is None else total.addmm_(row, factor)
        if total is not None:
            pending = siblings.group.all_reduce(total)
        if coming is not None:
            source = coming()
            source = source if ctx.product_dtype is None else source.to(ctx.product_dtype)
        flat = None if source is None else source.reshape(-1, source.shape[-1])
        half = len(rows)
        products = [
            _of_weight(row, flat, dtype, is_transposed=siblings.is_transposed)
            for row, dtype in zip(rows, ctx.dtypes[:half], strict=True)
        ]
        products += [_of_bias(row, dtype) for row, dtype in zip(rows, ctx.dtypes[half:], strict=True)]
        of_parameters = [
            None if row is None else _now_or_later(product, ctx.waiting, index, is_wanted=needs[index])
            for index, (row, product) in enumerate(zip([*rows, *rows], products, strict=True))
        ]
        of_source = None
        if pending is not None and total is not None:
            pending.wait()
            of_source = total.view(ctx.shape).to(ctx.dtype)
        return (of_source, None, None, None, *of_parameters)


class GatheredInput:
    """An input that was gathered of the ranks' parts, by which it can be gathered again.

    Args:
        whole: The input. It is not kept alive, nor is the part, but by who saves it for backward.
        part: This rank's part.
        gather: Begins to gather the whole of the part, and returns what waits for it.
    """

    def __init__(self, whole: Tensor, part: Tensor, gather: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._whole, self._part = weakref.ref(whole), weakref.ref(part)
        self._versions = _version(whole), _version(part)
        self.again = gather

    def is_of(self, source: Tensor) -> bool:
        """Whether a tensor is the input, of which nothing was written to."""
        part = self._part()
        return self._whole() is source and part is not None and self._versions == (_version(source), _version(part))

    def part(self) -> Tensor:
        """Return this rank's part."""
        part = self._part()
        assert part is not None, "`is_of` was asked"
        return part.detach()


class _Kept(NamedTuple):
    """A layer's outputs that it has not asked for yet, and what they were computed from."""

    outputs: Tensor
    parameters: tuple[Tensor | None, ...]
    versions: tuple[int, ...]


class _Entered(NamedTuple):
    """An input of siblings in a graph that is compiled, until all of them have read it."""

    source: Tensor
    entered: Tensor
    num_left: int
    has_grad: bool


class ColumnSiblings:
    """Column-parallel layers that may read one input; the first that is called computes for all of them.

    Args:
        modules: The layers, all in one storage order.
        group: The tensor parallel ranks.

    Attributes:
        group: The tensor parallel ranks.
        is_transposed: Whether the weights are stored as (inputs, outputs).
        gathered: The input that was gathered last; ``None`` where inputs come whole.

    Results that no sibling has fetched are dropped when another input comes, in backward, or by `forget`; whose
    results went to waste is not computed along again, such as the queries of an attention that reads its keys
    elsewhere.
    """

    def __init__(self, modules: Sequence[nn.Module], group: RankGroup) -> None:
        self.group = group
        self.is_transposed = is_transposed(modules[0])
        self._along: dict[nn.Module, list[Any]] = {module: list(modules) for module in modules}
        self._source: Tensor | None = None
        self._asked_first: nn.Module | None = None
        self._state: tuple[Any, ...] = ()
        self._kept: dict[nn.Module, _Kept] = {}
        self._entered: _Entered | None = None
        self._is_shared = True
        self._shares: dict[nn.Module, tuple[Split | None, Split | None]] = {}
        self.gathered: GatheredInput | None = None
        self._sharers = group  # also where the sum of the input's gradient is left to others

    def share(self, module: nn.Module, splits: Mapping[int, Split | None]) -> None:
        """Sum the gradients of a layer's weight and bias over the ranks that hold the same part of them.

        Args:
            module: The layer.
            splits: The parameters of which ranks share parts, by ``id``, with what is here.
        """
        found = [None if each is None else splits.get(id(each)) for each in _parameters(module)]
        if any(found):
            self._shares[module] = found[0], found[1]

    def parameters(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return a layer's weight and bias for one use."""
        weight, bias = _parameters(module)
        if module not in self._shares:
            return weight, bias
        of_weight, of_bias = self._shares[module]
        if of_weight is not None:
            weight = used(weight, of_weight, self._sharers)
        if bias is not None and of_bias is not None:
            bias = used(bias, of_bias, self._sharers)
        return weight, bias

    def entered(self, source: Tensor) -> Tensor:
        """Return the input of one of the layers in a graph that is compiled; siblings get the same for the same.

        Args:
            source: Shape ``(..., inputs)``, the same on every rank.

        Collective: the group, in backward.
        """
        known, has_grad = self._entered, torch.is_grad_enabled()
        if known is not None and known.source is source and known.has_grad == has_grad:
            left = known.num_left - 1
            self._entered = known._replace(num_left=left) if left else None
            return known.entered
        if self.group.size == 1:
            return source
        # A view, in whatever format autocast has: of a source that is written to before a sibling reads it, torch
        # refuses to use it, where a copy would keep what was there before.
        (entered,) = enter((source,), self.group)
        if known is not None:  # they read several inputs: nothing may be left when the graph ends
            self._entered, self._is_shared = None, False
        elif self._is_shared and len(self._along) > 1:
            self._entered = _Entered(source, entered, len(self._along) - 1, has_grad)
        return entered

    def __call__(self, module: nn.Module, source: Tensor, split: SplitBackward | None = None) -> Tensor:
        """Return one layer's outputs.

        Args:
            module: One of the siblings.
            source: Shape ``(..., inputs)``, the same on every rank.
            split: Where the weights' gradients may wait; ``None`` computes them with the input's.

        Returns:
            Shape ``(..., local outputs)``.

        Collective: the group, in backward.
        """
        if not torch.is_grad_enabled():  # nothing is shared without backward
            weight: Any = module.weight
            bias: Any = module.bias
            return nn.functional.linear(source, weight.t() if self.is_transposed else weight, bias)
        pending = None if split is None else split.pending
        state = (_version(source), _autocast_dtype(source.device.type), pending)
        if self._source is source and self._state == state:
            kept = self._kept.pop(module, None)
            if (
                kept is not None
                and kept.versions == tuple(map(_version, own := _parameters(module)))
                and all(map(operator.is_, kept.parameters, own))
            ):
                if not self._kept:
                    self.forget()
                return kept.outputs
        return self._computed(module, source, split, state)

    def forget(self) -> None:
        """Drop what no sibling has fetched, and compute it no more where the same sibling asks first."""
        if self._asked_first is not None and self._kept:
            along = self._along[self._asked_first]
            self._along[self._asked_first] = [module for module in along if module not in self._kept]
        self._source, self._asked_first, self._state, self._kept = None, None, (), {}

    def _computed(
        self, module: nn.Module, source: Tensor, split: SplitBackward | None, state: tuple[Any, ...]
    ) -> Tensor:
        self.forget()
        along = self._along[module]
        parameters = [_parameters(each) for each in along]
        flat = [*(weight for weight, _ in parameters), *(bias for _, bias in parameters)]
        for parameter in flat:
            if parameter is not None:
                # Where updated parameters are still being gathered, a call of torch's waits for its arguments; the
                # siblings' own calls, which would, come later.
                parameter.dim()
        own = [self.parameters(each) for each in along]
        flat = [*(weight for weight, _ in own), *(bias for _, bias in own)]
        waiting = None if split is None else split.waiting(source, flat)
        given = flat if waiting is None else waiting.hidden()
        gathered = self.gathered if waiting is None else None  # weights' gradients that wait keep the whole input
        if gathered is not None and not gathered.is_of(source):
            gathered = None
        outputs: tuple[Tensor, ...] = _Columns.apply(  # type: ignore[no-untyped-call]
            source, self, waiting, gathered, *given
        )
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
        gathers: Lengths of the ranks' outputs, to put them together; ``None`` leaves them split.
        group: The tensor parallel ranks.

    Attributes:
        siblings: As above.
        gathers: As above.
        weight_gradients: Where the weight's gradient may wait; see `SplitsItself`.
        vocabulary: Of an output head, how ranks share it; set by the plan, for `booster_runtime.linear_cross_entropy`.
    """

    weight_gradients: SplitBackward | None = None
    vocabulary: ByVocabulary

    def __init__(
        self, module: nn.Module, siblings: ColumnSiblings, group: RankGroup, gathers: Sequence[int] | None = None
    ) -> None:
        self._module, self._group = module, group
        self.siblings, self.gathers = siblings, gathers

    def __call__(self, source: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self.weight_gradients is None:
            weight, bias = self.siblings.parameters(self._module)
            factor = weight.t() if self.siblings.is_transposed else weight
            outputs = nn.functional.linear(self.siblings.entered(source), factor, bias)
        else:
            outputs = self._eager(source)
        return outputs if self.gathers is None else gather_last(outputs, self.gathers, self._group)

    @outside_of_graphs
    def _eager(self, source: Tensor) -> Tensor:
        return self.siblings(self._module, source, self.weight_gradients)


class _Row(torch.autograd.Function):
    """A row-parallel product, whose partial results are summed in place; the first rank's has the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: RankGroup,
        transposed: bool,  # noqa: FBT001 - autograd functions take no keywords
        waiting: Waiting | None,
    ) -> Tensor:
        needs_source, needs_weight, *_ = ctx.needs_input_grad
        ctx.is_transposed, ctx.shape, ctx.waiting = transposed, source.shape, waiting
        ctx.dtypes = source.dtype, weight.dtype, None if bias is None else bias.dtype
        device_type = source.device.type
        dtype = _autocast_dtype(device_type)
        if dtype is not None:
            source, weight = source.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(source if needs_weight or _waits(waiting, 0) else None, weight if needs_source else None)
        with torch.autocast(device_type, enabled=False):
            outputs = nn.functional.linear(
                source, weight.t() if transposed else weight, bias if group.rank == 0 else None
            ).contiguous()
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public name
            # Selective checkpointing may keep the product, and would sum it once more in backward.
            outputs = outputs.clone()
        group.all_reduce(outputs).wait()
        return not_a_view(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        source, weight = ctx.saved_tensors
        row = gradient.reshape(-1, gradient.shape[-1])
        of_dtype, weight_dtype, bias_dtype = ctx.dtypes
        of_source = None
        if weight is not None:
            of_source = (row @ (weight.t() if ctx.is_transposed else weight)).view(ctx.shape).to(of_dtype)
        flat = None if source is None else source.reshape(-1, source.shape[-1])
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        by_weight = _of_weight(row, flat, weight_dtype, is_transposed=ctx.is_transposed)
        of_weight = _now_or_later(by_weight, ctx.waiting, 0, is_wanted=needs_weight)
        of_bias = _now_or_later(_of_bias(row, bias_dtype), ctx.waiting, 1, is_wanted=needs_bias)
        return of_source, of_weight, of_bias, None, None, None


class RowForward:
    """The forward of a row-parallel layer.

    Args:
        module: The layer, with its local weight and its whole bias.
        group: The tensor parallel ranks.
        splits: Lengths of the ranks' inputs where these come whole; ``None`` where they come split.

    Attributes:
        splits: As above.
        weight_gradients: Where the weight's gradient may wait; see `SplitsItself`.
    """

    weight_gradients: SplitBackward | None = None

    def __init__(self, module: nn.Module, group: RankGroup, splits: Sequence[int] | None = None) -> None:
        self._module, self._group, self.splits = module, group, splits
        self._is_transposed = is_transposed(module)

    def __call__(self, source: Tensor) -> Tensor:
        if self.splits is not None:
            source = scatter_last(source, self.splits, self._group)
        if not torch.compiler.is_compiling() or self.weight_gradients is not None:
            return self._eager(source)
        weight, bias = _parameters(self._module)
        partial = nn.functional.linear(source, weight.t() if self._is_transposed else weight)
        if isinstance(self._group, AloneRank):
            return partial if bias is None or self._group.rank else partial + bias.to(partial.dtype)
        outputs = leave(partial, self._group)
        return outputs if bias is None else outputs + bias.to(outputs.dtype)

    @outside_of_graphs
    def _eager(self, source: Tensor) -> Tensor:
        given: Sequence[Tensor | None] = _parameters(self._module)
        split = self.weight_gradients
        waiting = None if split is None else split.waiting(source, given)
        if waiting is not None:
            given = waiting.hidden()
        outputs: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
            source, *given, self._group, self._is_transposed, waiting
        )
        return outputs
