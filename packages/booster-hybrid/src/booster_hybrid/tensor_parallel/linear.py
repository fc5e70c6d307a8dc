"""Column- and row-parallel linear layers on local weights, in the forms of ``nn.Linear`` and transformers' ``Conv1D``.

A column-parallel layer holds some of the outputs, a row-parallel one some of the inputs; the pair needs one sum in
forward (after the row) and one in backward (before the column). Column-parallel siblings that read the same input, such
as q, k and v, share that backward sum, and it travels while the weights' gradients are computed.

Reference: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_hybrid.mesh import AloneRank
from booster_hybrid.tensor_parallel.collectives import (
    enter,
    gather_last,
    leave,
    not_a_view,
    refuse_second_derivative,
    scatter_last,
    used,
)
from booster_hybrid.torch_functions import outside_of_graphs, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.pipeline.weight_gradients import SplitBackward, Waiting
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
    return lambda: row.sum(0).to(dtype)


def _waits(waiting: Waiting | None, index: int) -> bool:
    return waiting is not None and index in waiting.indices


def _now_or_later(
    product: Callable[[], Tensor], waiting: Waiting | None, index: int, *, is_wanted: bool
) -> Tensor | None:
    """Return a parameter's gradient for autograd, or defer it where it waits."""
    if waiting is not None and waiting.defer(index, product):
        return None
    return product() if is_wanted else None


class _Entry(torch.autograd.Function):
    """Hands one input to column-parallel layers; backward sums its gradient over ranks once, for all of them.

    The layers' parameters pass by here, so that their gradients are computed while that sum travels. Only what backward
    will need is kept: frozen weights don't keep the input alive, and of an input that was gathered this rank's part is
    kept, and gathered again while the input's gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, entry: ColumnEntry, gathered: GatheredInput | None, *parameters: Tensor | None
    ) -> Tensor:
        needs_source, _, _, *needs = ctx.needs_input_grad
        ctx.set_materialize_grads(False)  # what comes back is in the entry; of a layer that was not used, nothing
        ctx.entry, ctx.gathered, ctx.shape, ctx.dtype = entry, gathered, source.shape, source.dtype
        ctx.dtypes = [None if each is None else each.dtype for each in parameters]
        entry.needs_source, entry.product_dtype = needs_source, _autocast_dtype(source.device.type)
        entered = source.view_as(source) if entry.product_dtype is None else source.to(entry.product_dtype)
        half = len(parameters) // 2
        keeps_source = any(needs[:half]) or any(_waits(entry.waiting, index) for index in range(half))
        ctx.save_for_backward((entered if gathered is None else gathered.part()) if keeps_source else None)
        return entered

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        entry: ColumnEntry = ctx.entry
        rows, total = entry.come_back()
        (source,) = ctx.saved_tensors
        coming = None if source is None or ctx.gathered is None else ctx.gathered.again(source)
        pending = None if total is None else entry.group.all_reduce(total)
        if coming is not None:
            source = coming()
            source = source if entry.product_dtype is None else source.to(entry.product_dtype)
        flat = None if source is None else source.reshape(-1, source.shape[-1])
        half, (_, _, _, *needs) = len(ctx.dtypes) // 2, ctx.needs_input_grad
        of_parameters: list[Tensor | None] = [None] * len(needs)
        for index, row in rows:
            weight_dtype, bias_dtype = ctx.dtypes[index], ctx.dtypes[half + index]
            of_weight = _of_weight(row, flat, weight_dtype, is_transposed=entry.is_transposed)
            for place, product in ((index, of_weight), (half + index, _of_bias(row, bias_dtype))):
                found = _now_or_later(product, entry.waiting, place, is_wanted=needs[place])
                before = of_parameters[place]
                of_parameters[place] = found if before is None or found is None else before + found
        if pending is None or total is None:
            return (None, None, None, *of_parameters)
        pending.wait()
        return (total.view(ctx.shape).to(ctx.dtype), None, None, *of_parameters)


class _Column(torch.autograd.Function):
    """A column-parallel product of what has entered; backward leaves the gradients to the entry.

    Autograd does not see the layer's parameters here, which are none of the arguments.
    """

    @staticmethod
    def forward(ctx: Any, entered: Tensor, entry: ColumnEntry, module: nn.Module) -> Tensor:
        ctx.entry, ctx.index = entry, entry.modules.index(module)
        weight, bias = entry.parameters[ctx.index]
        if entry.product_dtype is None:
            outputs = nn.functional.linear(entered, weight.t() if entry.is_transposed else weight, bias)
        else:
            weight = weight.to(entry.product_dtype)
            bias = None if bias is None else bias.to(entry.product_dtype)
            with torch.autocast(entered.device.type, enabled=False):
                outputs = nn.functional.linear(entered, weight.t() if entry.is_transposed else weight, bias)
        ctx.save_for_backward(weight if entry.needs_source else None)
        return not_a_view(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        refuse_second_derivative()
        (weight,) = ctx.saved_tensors
        ctx.entry.add(ctx.index, gradient.reshape(-1, gradient.shape[-1]), weight)
        return None, None, None


class ColumnEntry:
    """What column-parallel layers of one input have in common for its backward, which does not keep the input.

    Args:
        siblings: The layers.
        modules: Those of the layers that may read it.

    Attributes:
        modules: As above.
        parameters: Their weights and biases.
        waiting: Which gradients of parameters wait.
        needs_source: Whether the input has a gradient.
        product_dtype: The format of autocast, if it is on.
        group: The ranks that sum the gradient.
        is_transposed: Whether weights are stored as (inputs, outputs).
    """

    needs_source: bool
    product_dtype: torch.dtype | None
    waiting: Waiting | None

    def __init__(self, siblings: ColumnSiblings, modules: Sequence[nn.Module]) -> None:
        self._siblings, self.modules = siblings, modules
        self.parameters = [_parameters(each) for each in modules]
        self._rows: list[tuple[int, Tensor]] = []
        self._total: Tensor | None = None
        self.group, self.is_transposed = siblings.group, siblings.is_transposed

    def enter(self, source: Tensor, split: SplitBackward | None) -> Tensor:
        """Return what the layers compute with, in the format of autocast.

        Args:
            source: The input.
            split: Where the weights' gradients may wait; ``None`` computes them with the input's.
        """
        for weight, bias in self.parameters:
            # Where updated parameters are still being gathered, a call of torch's waits for its arguments.
            weight.dim()
            if bias is not None:
                bias.dim()
        own = list(map(self._siblings.shared, self.modules, self.parameters))
        flat = [*(weight for weight, _ in own), *(bias for _, bias in own)]
        self.waiting = None if split is None else split.waiting(source, flat)
        gathered = self._siblings.gathered if self.waiting is None else None  # what waits keeps the whole input
        if gathered is not None and not gathered.is_of(source):
            gathered = None
        given = flat if self.waiting is None else self.waiting.hidden()
        entered: Tensor = _Entry.apply(source, self, gathered, *given)  # type: ignore[no-untyped-call]
        return entered

    def has(self, module: nn.Module) -> bool:
        """Return whether a layer's parameters have passed by, as they are."""
        (weight, bias), (own_weight, own_bias) = self.parameters[self.modules.index(module)], _parameters(module)
        return weight is own_weight and bias is own_bias

    def add(self, index: int, row: Tensor, weight: Tensor | None) -> None:
        """Take the gradient of a layer's outputs, and add that of its input; in backward."""
        self._rows.append((index, row))
        if weight is not None:
            factor = weight.t() if self.is_transposed else weight
            self._total = row @ factor if self._total is None else self._total.addmm_(row, factor)

    def come_back(self) -> tuple[list[tuple[int, Tensor]], Tensor | None]:
        """Return the gradients of outputs with the layers' places, and that of the input; for one backward."""
        self._siblings.close(self)  # backward has come this far: nobody will read it any more
        rows, total = self._rows, self._total
        self._rows, self._total = [], None
        return rows, total


class GatheredInput:
    """An input that was gathered of the ranks' parts, by which it can be gathered again.

    Args:
        whole: The input. It is not kept alive, nor is the part, but by who saves it for backward.
        part: This rank's part.
        gather: Begins to gather the whole of the part, and returns what waits for it.
    """

    def __init__(self, whole: Tensor, part: Tensor, gather: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._whole, self._part = weakref.ref(whole), weakref.ref(part)
        self._versions = version_of(whole), version_of(part)
        self.again = gather

    def is_of(self, source: Tensor) -> bool:
        """Whether a tensor is the input, of which nothing was written to."""
        part = self._part()
        return self._whole() is source and part is not None and self._versions == (version_of(source), version_of(part))

    def part(self) -> Tensor:
        """Return this rank's part."""
        part = self._part()
        assert part is not None, "`is_of` was asked"
        return part.detach()


@dataclass(eq=False)
class _Open:
    """An input that siblings have still to read.

    Attributes:
        source: The input.
        state: What else must be as it was.
        entered: What they compute with.
        entry: Where gradients come back; ``None`` in a graph that is compiled.
        num_left: How many of them.
    """

    source: Tensor
    state: tuple[Any, ...]
    entered: Tensor
    entry: ColumnEntry | None
    num_left: int


class ColumnSiblings:
    """Column-parallel layers that may read one input, whose gradient is then summed once.

    Args:
        modules: The layers, all in one storage order.
        group: The tensor parallel ranks.

    Attributes:
        group: The tensor parallel ranks.
        is_transposed: Whether the weights are stored as (inputs, outputs).
        gathered: The input that was gathered last; ``None`` where inputs come whole.

    Layers that turn out to read different inputs, such as the queries of an attention that reads its keys elsewhere,
    share nothing from then on.
    """

    def __init__(self, modules: Sequence[nn.Module], group: RankGroup) -> None:
        self.group = group
        self.is_transposed = is_transposed(modules[0])
        self._modules = modules
        self._open: _Open | None = None
        self._is_shared = len(modules) > 1
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
        return self.shared(module, _parameters(module))

    def shared(self, module: nn.Module, given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Return a layer's weight and bias, whose gradients come together where ranks share parts of them."""
        if module not in self._shares:
            return given
        weight, bias = given
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
        if self.group.size == 1:
            return source
        state = (torch.is_grad_enabled(),)
        known = self._known(source, state)
        if known is not None:
            return known.entered
        # A view, in whatever format autocast has: of a source that is written to before a sibling reads it, torch
        # refuses to use it, where a copy would keep what was there before.
        (entered,) = enter((source,), self.group)
        self._keep_open(source, state, entered, None)
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
            weight, bias = _parameters(module)
            return nn.functional.linear(source, weight.t() if self.is_transposed else weight, bias)
        state = version_of(source), _autocast_dtype(source.device.type), None if split is None else split.pending
        known = self._known(source, state)
        if known is not None and known.entry is not None and known.entry.has(module):
            entered, entry = known.entered, known.entry
        else:
            entry = ColumnEntry(self, self._modules if self._is_shared else [module])
            entered = entry.enter(source, split)
            self._keep_open(source, state, entered, entry)
        outputs: Tensor = _Column.apply(entered, entry, module)  # type: ignore[no-untyped-call]
        return outputs

    def close(self, entry: ColumnEntry | None = None) -> None:
        """Let nobody read an input any more, and share nothing from now on if somebody has not.

        Args:
            entry: Where its gradients come back; ``None`` for whatever input there is.
        """
        if self._open is not None and (entry is None or self._open.entry is entry):
            self._open, self._is_shared = None, False

    def _known(self, source: Tensor, state: tuple[Any, ...]) -> _Open | None:
        """Return an input that has entered, if it may still be read, which a sibling then has."""
        known = self._open
        if known is None:
            return None
        if known.source is not source or known.state != state:
            self.close()
            return None
        known.num_left -= 1
        if not known.num_left:
            self._open = None
        return known

    def _keep_open(self, source: Tensor, state: tuple[Any, ...], entered: Tensor, entry: ColumnEntry | None) -> None:
        if self._is_shared:
            self._open = _Open(source, state, entered, entry, len(self._modules) - 1)


def _parameters(module: Any) -> tuple[Tensor, Tensor | None]:
    own = module._parameters  # noqa: SLF001 - called several times a layer, where `__getattr__` is slow
    weight, bias = own.get("weight"), own.get("bias")
    return module.weight if weight is None else weight, module.bias if bias is None else bias


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

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        # The only argument, whatever the layer calls it: its name is that in the layer's class.
        (source,) = (*args, *kwargs.values())
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
        ctx.is_transposed, ctx.shape, ctx.waiting, ctx.is_split = transposed, source.shape, waiting, group.size > 1
        ctx.dtypes = source.dtype, weight.dtype, None if bias is None else bias.dtype
        device_type = source.device.type
        dtype = _autocast_dtype(device_type)
        source = source if dtype is None else source.to(dtype)
        # The weight is saved as it is: one in autocast's format would be another for each microbatch, and a backward
        # that is differentiated has to find the parameter.
        kept = weight if waiting is None else waiting.parameters[0]
        ctx.save_for_backward(source if needs_weight or _waits(waiting, 0) else None, kept if needs_source else None)
        with torch.autocast(device_type, enabled=False):
            factor, bias = weight.to(source.dtype), None if bias is None else bias.to(source.dtype)
            outputs = nn.functional.linear(
                source, factor.t() if transposed else factor, bias if group.rank == 0 else None
            ).contiguous()
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - no public name
            # Selective checkpointing may keep the product, and would sum it once more in backward.
            outputs = outputs.clone()
        group.all_reduce(outputs).wait()
        return not_a_view(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.is_split:
            refuse_second_derivative()
        source, weight = ctx.saved_tensors
        row = gradient.reshape(-1, gradient.shape[-1])
        of_dtype, weight_dtype, bias_dtype = ctx.dtypes
        of_source = None
        if weight is not None:
            weight = weight.to(row.dtype)
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

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        # The only argument, whatever the layer calls it: its name is that in the layer's class.
        (source,) = (*args, *kwargs.values())
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
