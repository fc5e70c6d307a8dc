"""Which rows go where when tokens are sent to their experts: arithmetic on indices and counts.

A token chooses ``top_k`` experts; each choice is a *slot*, number ``token * top_k + position``. A slot whose index is
the number of experts, or more, chooses none: routers with a capacity drop tokens so, and nothing is sent for it.
Experts are spread in blocks: rank ``r`` holds ``[r * n, (r + 1) * n)`` of them. Rows are sent in the order of their
experts, so that what a rank receives is sorted by sender, and by expert within each sender's rows.
"""

from __future__ import annotations

import contextlib
import itertools
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

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
