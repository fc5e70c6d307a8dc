"""Sending tokens to their experts and back, differentiably: dispatch and combine, each the other's transpose.

A token chooses ``top_k`` experts; each choice is a *slot*, number ``token * top_k + position``. A slot whose index is
the number of experts, or more, chooses none: routers with a capacity drop tokens so, and nothing is sent for it.
Experts are spread in blocks: rank ``r`` holds ``[r * n, (r + 1) * n)`` of them. Rows are sent in the order of their
experts, so that what a rank receives is sorted by sender, and by expert within each sender's rows.

For T tokens, k choices each, H numbers a token and p ranks over which choices are even, each of dispatch and combine
sends ``k * T * H * (p - 1) / p`` numbers from each rank, once in forward and once in backward. With dispatch go the
weights, one number for each choice, and beforehand how many rows there are for each expert. Every rank of the group
takes part in each exchange, also one that sends or receives nothing.

Reference: Lepikhin et al. 2020, "GShard" (arXiv:2006.16668).
"""

from __future__ import annotations

import contextlib
import itertools
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_hybrid.tensor_parallel.collectives import refuse_second_derivative
from booster_hybrid.torch_functions import outside_of_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from booster_hybrid.mesh import RankGroup


_has_no_values: ContextVar[bool] = ContextVar("booster tokens without values", default=False)


@contextlib.contextmanager
def assuming_balanced_experts() -> Iterator[None]:
    """Let as many tokens of this thread choose each expert inside, as in a plan, where choices have no values."""
    token = _has_no_values.set(True)
    try:
        yield
    finally:
        _has_no_values.reset(token)


def is_evenly_routed() -> bool:
    """Return whether this thread is in `assuming_balanced_experts`."""
    return _has_no_values.get()


@dataclass(frozen=True)
class Route:
    """Where the rows of one call go, and what comes here.

    Args:
        slots: The slot of each row that is sent, in the order of sending; shape ``(sent[-1],)``.
        top_k: Slots of each token.
        sent: Bounds of the rows for each rank, one entry more than ranks.
        received: Bounds of the rows of each rank among those that come here.
        local_experts: For each row that comes here the expert that it is for, counted from this rank's first.
        most_rows: The largest number of rows that come here for one expert.
    """

    slots: Tensor
    top_k: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    local_experts: Tensor
    most_rows: int

    def take(self, values: Tensor) -> Tensor:
        """Return the row of each slot that is sent.

        Args:
            values: A row for each token, shape ``(tokens, width)``.
        """
        return values.index_select(0, torch.div(self.slots, self.top_k, rounding_mode="floor"))

    def place(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Return the rows that were sent at the places of their slots, and zeros for slots that were not sent.

        Args:
            rows: As ``take`` returns them.
            num_tokens: Number of tokens.

        Returns:
            Shape ``(tokens, top_k, width)``.
        """
        num_slots = num_tokens * self.top_k
        is_full = rows.shape[0] == num_slots
        placed = (rows.new_empty if is_full else rows.new_zeros)((num_slots, *rows.shape[1:]))
        placed[self.slots] = rows
        return placed.view(num_tokens, self.top_k, *rows.shape[1:])


def sort_slots(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the slots in the order of their experts, those that choose one, and how many choose each expert.

    Args:
        top_k_index: The experts that each token chooses, shape ``(tokens, top_k)``.
        num_experts: Number of experts.
    """
    experts = top_k_index.reshape(-1)
    if is_evenly_routed():
        counts = torch.tensor([(len(experts) + each) // num_experts for each in range(num_experts)])
    else:
        counts = torch.bincount(experts.clamp(max=num_experts), minlength=num_experts + 1)[:num_experts]
    # Stable, so that runs are equal to the bit.
    return torch.sort(experts, stable=True).indices, counts


def bounds_of(counts: Sequence[int], size: int) -> tuple[int, ...]:
    """Return where the rows of each rank begin and end.

    Args:
        counts: Numbers of rows, as many for each rank.
        size: Number of ranks.
    """
    share = len(counts) // size
    of_rank = [sum(counts[rank * share : (rank + 1) * share]) for rank in range(size)]
    return tuple(itertools.accumulate(of_rank, initial=0))


def make_route(order: Tensor, top_k: int, counts: Tensor, received_counts: Tensor, size: int) -> Route:
    """Return the route of one call.

    Args:
        order: As `sort_slots` returns it.
        top_k: Slots of each token.
        counts: Rows for each expert, shape ``(experts,)``.
        received_counts: Rows of each rank for each of this rank's experts, shape ``(experts,)``, by rank.
        size: Number of ranks.
    """
    both = torch.stack([counts, received_counts]).tolist()  # the one time that a device is waited for
    sent, received = (bounds_of(each, size) for each in both)
    own = torch.arange(len(both[0]) // size, device=order.device).repeat(size)
    local = torch.repeat_interleave(own, received_counts, output_size=received[-1])
    most_rows = max(sum(both[1][expert :: len(own) // size]) for expert in range(len(own) // size))
    return Route(order[: sent[-1]], top_k, sent, received, local, most_rows)


def find_route(top_k_index: Tensor, num_experts: int, group: RankGroup) -> Route:
    """Return where tokens go, and what comes here.

    Args:
        top_k_index: The experts that each token chooses, shape ``(tokens, top_k)``.
        num_experts: Number of experts on all ranks.
        group: The ranks that hold them.

    Collective: the group.
    """
    order, counts = sort_slots(top_k_index, num_experts)
    received = torch.empty_like(counts)
    bounds = range(0, num_experts + 1, num_experts // group.size)
    group.all_to_all(counts, bounds, received, bounds).wait()
    return make_route(order, top_k_index.shape[1], counts, received, group.size)


@outside_of_graphs
def dispatch(route: Route, group: RankGroup, hidden: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Send each token, and the weight of each of its choices, to the ranks of the experts that it chooses.

    Args:
        route: Where they go.
        group: The ranks.
        hidden: Shape ``(tokens, width)``.
        *weights: Shape ``(tokens, top_k)``; none where they don't travel.

    Returns:
        What came here: hidden states, shape ``(rows, width)``, and weights, shape ``(rows, 1)``.

    Collective: the group, in forward and in backward.
    """
    came: tuple[Tensor, ...] = _Dispatch.apply(route, group, hidden, *weights)  # type: ignore[no-untyped-call]
    return came


@outside_of_graphs
def combine(rows: Tensor, num_tokens: int, route: Route, group: RankGroup) -> Tensor:
    """Send the experts' outputs back, and add up those of each token.

    Args:
        rows: Shape ``(rows, width)``, in the order in which `dispatch` has brought their inputs.
        num_tokens: Number of this rank's own tokens.
        route: As for `dispatch`.
        group: The ranks.

    Returns:
        Shape ``(tokens, width)``.

    Collective: the group, in forward and in backward.
    """
    result: Tensor = _Combine.apply(rows, num_tokens, route, group)  # type: ignore[no-untyped-call]
    return result


def without_rows(rows: Tensor, weights: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the output of experts that no token has chosen: no rows.

    Experts that were not called would be missing in the graph. The exchanges of backward would be, too, and other ranks
    wait in them; and the experts' gradients would be ``None`` in place of zero.

    Args:
        rows: The experts' inputs, shape ``(0, width)``.
        weights: Shape ``(0, 1)``.
        parameters: Those of the experts.
    """
    result: Tensor = _WithoutRows.apply(rows, weights, *parameters)  # type: ignore[no-untyped-call]
    return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, group: RankGroup, hidden: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.group, ctx.num_tokens = route, group, hidden.shape[0]
        chosen = [each.reshape(-1, 1).index_select(0, route.slots) for each in weights]
        return tuple(_exchanged((route.take(hidden), *chosen), route.sent, route.received, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("Experts that are spread over", "ep_size")
        route: Route = ctx.route
        hidden, *weights = (
            route.place(each, ctx.num_tokens) for each in _exchanged(gradients, route.received, route.sent, ctx.group)
        )
        return None, None, hidden.sum(1), *(each.squeeze(-1) for each in weights)


class _Combine(torch.autograd.Function):
    # Nothing is saved here for backward: recomputation of a checkpointed layer may then stop before the exchange.

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_tokens: int, route: Route, group: RankGroup) -> Tensor:
        ctx.route, ctx.group = route, group
        (back,) = _exchanged((rows,), route.received, route.sent, group)
        return route.place(back, num_tokens).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative("Experts that are spread over", "ep_size")
        route: Route = ctx.route
        (rows,) = _exchanged((route.take(gradient),), route.sent, route.received, ctx.group)
        return rows, None, None, None


class _WithoutRows(torch.autograd.Function):
    # A checkpointed layer is recomputed when something that was saved is asked for. Experts with rows save and ask; so
    # these do as well, that all ranks recompute at the same place among the exchanges.

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.kinds = [(each.shape, each.dtype, each.device) for each in parameters]
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        del gradient
        rows, weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_needed else None
            for is_needed, (shape, dtype, device) in zip(needed, ctx.kinds, strict=True)
        ]
        return torch.zeros_like(rows), torch.zeros_like(weights), *zeros


def _exchanged(
    tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: RankGroup
) -> list[Tensor]:
    """Return what comes here of tensors with rows for each rank; all travel at the same time.

    Args:
        tensors: Shape ``(sent[-1], width)`` each.
        sent: Bounds of the rows for each rank.
        received: Bounds of the rows of each rank.
        group: The ranks.

    Collective: the group.
    """
    results, pending = [], []
    for tensor in tensors:
        width = tensor.shape[1]
        result = tensor.new_empty((received[-1], width))
        outgoing, incoming = ([bound * width for bound in bounds] for bounds in (sent, received))
        source = tensor.contiguous().view(-1)
        pending.append(group.all_to_all(source, outgoing, result.view(-1), incoming))
        results.append(result)
    for each in pending:
        each.wait()
    return results
