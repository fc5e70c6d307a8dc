"""Differentiable collectives of tensor parallelism, each with its transpose as backward.

Names follow Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a replicated activation *enters* a split
region, where its gradient becomes a sum over ranks, and partial results *leave* it by a sum.

Inside of the graphs that ``torch.compile`` makes they are torch's functional collectives, which its compiler knows: it
moves them apart from what waits for them, and on CUDA can take them into the products around them.

Gradients of which each rank computes a part are summed where a parameter is used, or where a module's outputs are. Such
parameters are norms of each head, which are whole on every rank and work on split activations, and keys and values that
several ranks hold. A hook on the parameter would sum all that reaches it, also the gradient of a penalty on weights,
which every rank has whole; and it could not be put on a parameter that is trained later. Such outputs are those of
latent attention, which projects hidden states to a latent vector and to the rotary part of the keys in one layer. The
vector goes through column-parallel layers, which sum its gradient; the rotary part goes to the heads as it is, so that
each rank has the gradient of its own heads alone.
Reference: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup
    from booster_hybrid.tensor_parallel.split import Split

    _Ranks = RankGroup | str
    """A group; in graphs its name, as the compiler of torch 2.10 passes no objects to autograd's functions."""
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from booster_hybrid.modules import ModulePatches


_GATHER_BYTES, _DEVICE_GATHER_BYTES = 1 << 21, 1 << 27
"""Results are put together in blocks of about this size, so that they need not exist twice."""


def summed(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of a tensor that nobody else reads, in its own memory where that is dense.

    Collective: the group.
    """
    total = tensor.contiguous()
    if total is tensor:
        # Autograd may hand one gradient to several nodes, and a saved output must stay what it was.
        total = tensor.clone()
    group.all_reduce(total).wait()
    return total


def gathered_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together, outside of autograd.

    Collective: the group.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    whole = tensor.new_empty((rows.shape[0], sum(sizes)))
    nbytes = _GATHER_BYTES if tensor.device.type == "cpu" else _DEVICE_GATHER_BYTES
    step = max(nbytes // max(whole.shape[-1] * tensor.element_size(), 1), 1)
    buffer = tensor.new_empty(min(step, rows.shape[0]) * whole.shape[-1])
    for start in range(0, rows.shape[0], step):
        own = rows[start : start + step]
        bounds = [0, *(own.shape[0] * end for end in itertools.accumulate(sizes))]
        buffer[bounds[group.rank] : bounds[group.rank + 1]].view(own.shape).copy_(own)
        group.all_gather(buffer[: bounds[-1]], bounds).wait()
        parts = [
            buffer[first:last].view(-1, size) for first, last, size in zip(bounds, bounds[1:], sizes, strict=False)
        ]
        torch.cat(parts, dim=-1, out=whole[start : start + step])
    return not_a_view(whole.view(*tensor.shape[:-1], sum(sizes)))


def not_a_view(tensor: Tensor) -> Tensor:
    """Return the result of a differentiable function so that the model may change it in place.

    Autograd refuses that for a view that was made inside of one, be it of memory that nobody else has.
    """
    if not tensor._is_view():  # noqa: SLF001 - no public name
        return tensor
    fresh: Tensor = torch.ops.aten._unsafe_view.default(tensor, tensor.shape)  # noqa: SLF001 - no public name
    return fresh


def own_part(tensor: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
    """Return a rank's part of the last dimension, in memory of its own where it is not all of it."""
    start = sum(sizes[:rank])
    return tensor[..., start : start + sizes[rank]].contiguous()


def refuse_second_derivative(what: str = "Layers that are split over tensor parallel", option: str = "tp_size") -> None:
    """Raise in a backward that is itself to be differentiated: the result would leave out the other ranks.

    Args:
        what: What is differentiated, for the message.
        option: The option of the plugin that splits it.

    Raises:
        GradientError: Under ``create_graph=True``.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # nothing else enables gradients in backward
        msg = (
            f"{what} ranks have no second derivative, which `create_graph=True` asks for. Leave it out, or train this "
            f"model with `{option}=1`."
        )
        raise GradientError(msg)


def _done(started: Tensor) -> Tensor:
    """Return the result of a functional collective."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(started)  # noqa: SLF001 - `torch.distributed`'s own, in graphs
    return result


def _summed_in_graph(tensor: Tensor, name: str) -> Tensor:
    return _done(torch.ops._c10d_functional.all_reduce(tensor.contiguous(), "sum", name))  # noqa: SLF001 - as above


def _gathered_in_graph(tensor: Tensor, dim: int, size: int, name: str) -> Tensor:
    """Return parts of one length, put together."""
    whole = _done(torch.ops._c10d_functional.all_gather_into_tensor(tensor.contiguous(), size, name))  # noqa: SLF001
    return whole if dim == 0 else torch.cat(torch.chunk(whole, size), dim)


def _scattered_in_graph(tensor: Tensor, dim: int, size: int, name: str) -> Tensor:
    """Return this rank's part of a sum that all ranks have equally long parts of."""
    source = tensor.contiguous() if dim == 0 else torch.cat(torch.chunk(tensor, size, dim))
    return _done(torch.ops._c10d_functional.reduce_scatter_tensor(source, "sum", size, name))  # noqa: SLF001 - as above


def _gathered_last_in_graph(tensor: Tensor, sizes: Sequence[int], name: str) -> Tensor:
    most = max(sizes)
    if min(sizes) == most:
        return _gathered_in_graph(tensor, tensor.dim() - 1, len(sizes), name)
    filled = torch.nn.functional.pad(tensor, (0, most - tensor.shape[-1]))
    parts = torch.split(_gathered_in_graph(filled, tensor.dim() - 1, len(sizes), name), most, -1)
    return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)


def _told(group: RankGroup) -> _Ranks:
    return group.name if torch.compiler.is_compiling() else group


def _summed(tensor: Tensor, ranks: _Ranks) -> Tensor:
    return _summed_in_graph(tensor, ranks) if isinstance(ranks, str) else summed(tensor, ranks)


def _gathered(tensor: Tensor, sizes: list[int], ranks: _Ranks) -> Tensor:
    if isinstance(ranks, str):
        return _gathered_last_in_graph(tensor, sizes, ranks)
    return gathered_last(tensor, sizes, ranks)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        if not isinstance(ranks, str):  # in graphs each tensor is by itself, and has a gradient
            ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        if len(gradients) == 1:
            return None, None if gradients[0] is None else _summed(gradients[0], ctx.ranks)
        known = [gradient for gradient in gradients if gradient is not None]
        sums = iter(_summed_together(known, ctx.ranks))
        return None, *(None if gradient is None else next(sums) for gradient in gradients)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shape: list[int], dim: int, bounds: list[int], ranks: _Ranks) -> Tensor:
        ctx.shape, ctx.dim, ctx.bounds, ctx.ranks = shape, dim, bounds, ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative()
        # All ranks sum the whole tensor, which is small, instead of each set of sharers its part in a group of its own.
        whole, position = gradient.new_zeros(ctx.shape), 0
        ranges = list(zip(ctx.bounds[::2], ctx.bounds[1::2], strict=True))
        for start, stop in ranges:
            whole.narrow(ctx.dim, start, stop - start).copy_(gradient.narrow(ctx.dim, position, stop - start))
            position += stop - start
        total = _summed(whole, ctx.ranks)
        parts = [total.narrow(ctx.dim, start, stop - start) for start, stop in ranges]
        return torch.cat(parts, ctx.dim), None, None, None, None


class _Paired(torch.autograd.Function):
    """Leaves by a sum, gathers the last dimension or takes a part of it; backward does what transposes it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, operation: str, sizes: list[int], rank: int, ranks: _Ranks) -> Tensor:
        ctx.operation, ctx.sizes, ctx.rank, ctx.ranks = operation, sizes, rank, ranks
        if operation == "leave":
            return _summed(tensor, ranks)
        return _gathered(tensor, sizes, ranks) if operation == "gather" else own_part(tensor, sizes, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative()
        if ctx.operation == "gather":
            gradient = own_part(gradient, ctx.sizes, ctx.rank)
        elif ctx.operation == "take":
            gradient = _gathered(gradient, ctx.sizes, ctx.ranks)
        return gradient, None, None, None, None


class _Positions(torch.autograd.Function):
    """Gathers the positions of sequences, or sums them and keeps this rank's; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, name: str, gathers: bool) -> Tensor:  # noqa: FBT001 - no keywords
        ctx.size, ctx.name, ctx.gathers = size, name, gathers
        return (_gathered_in_graph if gathers else _scattered_in_graph)(tensor, 1, size, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back = _scattered_in_graph if ctx.gathers else _gathered_in_graph
        return back(gradient, 1, ctx.size, ctx.name), None, None, None


def positions_in_graph(tensor: Tensor, group: RankGroup, *, gathers: bool) -> Tensor:
    """Gather equally long parts of sequences, or sum whole ones and keep this rank's part, in a graph.

    Args:
        tensor: Shape ``(batch, positions, size)``.
        group: The ranks.
        gathers: Whether it is a part.

    Collective: the group, also in backward.
    """
    result: Tensor = _Positions.apply(tensor, group.size, group.name, gathers)  # type: ignore[no-untyped-call]
    return result


def _paired(operation: str, tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    if group.size == 1:
        return tensor
    result: Tensor = _Paired.apply(  # type: ignore[no-untyped-call]
        tensor, operation, list(sizes), group.rank, _told(group)
    )
    return result


def enter(tensors: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """Return replicated tensors for use by split layers; their gradients are summed over ranks, together.

    Collective: the group, in backward.
    """
    if group.size == 1:
        return tuple(tensors)
    if torch.compiler.is_compiling():
        return tuple(_Enter.apply(group.name, tensor)[0] for tensor in tensors)  # type: ignore[no-untyped-call]
    results: tuple[Tensor, ...] = _Enter.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return results


def share(tensor: Tensor, split: Split, group: RankGroup) -> Tensor:
    """Return a part of a parameter that several ranks hold; its gradient is summed over these.

    Collective: the group, in backward.
    """
    bounds = [bound for both in split.ranges for bound in both]
    shape = list(split.global_shape)
    result: Tensor = _Share.apply(tensor, shape, split.dim, bounds, _told(group))  # type: ignore[no-untyped-call]
    return result


def leave(tensor: Tensor, group: RankGroup) -> Tensor:
    """Return the sum over ranks of partial results; its gradient is the same on every rank.

    Collective: the group.
    """
    return _paired("leave", tensor, (), group)


def gather_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return the ranks' parts of the last dimension, put together; what follows is computed alike on every rank.

    Args:
        tensor: Shape ``(..., sizes[rank])``.
        sizes: Length of each rank's part.
        group: The ranks.

    Collective: the group.
    """
    return _paired("gather", tensor, sizes, group)


def scatter_last(tensor: Tensor, sizes: Sequence[int], group: RankGroup) -> Tensor:
    """Return this rank's part of a replicated tensor's last dimension.

    Collective: the group, in backward.
    """
    return _paired("take", tensor, sizes, group)


def _summed_together(tensors: Sequence[Tensor], group: RankGroup) -> list[Tensor]:
    """Return sums over ranks of tensors that others may read, of which those of one format travel as one."""
    if len(tensors) == 1:
        return [summed(tensors[0], group)]
    sums: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[index].reshape(-1) for index in places])
        group.all_reduce(flat).wait()
        for index, part in zip(places, torch.split(flat, [tensors[index].numel() for index in places]), strict=True):
            sums[index] = part.view(tensors[index].shape)
    return [sums[index] for index in range(len(tensors))]


def used(parameter: Tensor, split: Split | None, group: RankGroup) -> Tensor:
    """Return a parameter for one use, whose gradient is summed over ranks.

    Args:
        parameter: The parameter.
        split: Which part of the whole it is, where ranks share parts; ``None`` where it is whole.
        group: The ranks.

    Collective: the group, in backward.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and parameter.requires_grad):
        return parameter
    return enter((parameter,), group)[0] if split is None else share(parameter, split, group)


class GradientAllReduce:
    """The forward of a module some of whose parameters sum their gradient over ranks.

    While it runs, the modules hold what `used` returns in the place of the parameters.

    Args:
        module: The module whose forward reads the parameters.
        group: The ranks.

    Attributes:
        splits: Which part of a whole the parameters are, by the module that holds them, this one or one inside, and
            their name in it; ``None`` for whole ones.
    """

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._group = group
        self.splits: dict[tuple[nn.Module, str], Split | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = [(holder._parameters, name, holder._parameters[name]) for holder, name in self.splits]  # noqa: SLF001
        try:
            for (parameters, name, parameter), split in zip(kept, self.splits.values(), strict=True):
                if parameter is not None:
                    parameters[name] = used(parameter, split, self._group)  # type: ignore[assignment]
            return self._forward(*args, **kwargs)
        finally:
            for parameters, name, parameter in kept:
                parameters[name] = parameter


def sum_where_used(
    module: nn.Module,
    splits: Mapping[int, Split | None],
    group: RankGroup,
    changes: ModulePatches,
    holders: Iterable[nn.Module] | None = None,
) -> None:
    """Let a module sum the gradients of some parameters that it uses, in place.

    Args:
        module: The module whose forward reads them.
        splits: The parameters, by ``id``, as for `used`.
        group: The ranks.
        changes: Notes what is replaced.
        holders: The modules that hold them; ``None`` looks at the module and all inside.
    """
    found = {
        (holder, name): splits[id(parameter)]
        for holder in (module.modules() if holders is None else holders)
        for name, parameter in holder.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in splits
    }
    if not found:
        return
    forward: Any = vars(module).get("forward")
    if not isinstance(forward, GradientAllReduce):
        forward = GradientAllReduce(module, group)
        changes.forward(module, forward)
    forward.splits.update(found)


class OutputSum:
    """Sums over ranks what a module returns, or the gradient of its last outputs.

    Args:
        module: The module, which returns a tensor.
        group: The ranks.
        changes: Notes the hook.
        is_partial: Whether what it returns is a part of a sum; else its gradient is.
        number: Of how many of the last outputs the gradient is summed; ``None`` for all.

    Attributes:
        module: As above.
        group: As above; who splits sequences between layers sums at the borders of blocks instead.
        is_partial: As above.
    """

    def __init__(
        self,
        module: nn.Module,
        group: RankGroup,
        changes: ModulePatches,
        *,
        is_partial: bool = False,
        number: int | None = None,
    ) -> None:
        self.module, self.group, self.is_partial, self._number = module, group, is_partial, number
        changes.hook(module.register_forward_hook(self))

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the outputs.

        Collective: the ranks, in forward or in backward.
        """
        del module, args
        if self.is_partial or self.group.size == 1:
            return leave(output, self.group)
        if self._number is None:
            return enter((output,), self.group)[0]
        others, own = output[..., : -self._number], output[..., -self._number :]
        return torch.cat([others, *enter((own,), self.group)], -1)
