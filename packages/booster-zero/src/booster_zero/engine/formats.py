"""Number formats and devices of parameters, and the pieces of them that a rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_runtime.sharding import ParameterPiece, is_cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.partition import BucketPlan


@dataclass(frozen=True, kw_only=True)
class Format:
    """The number formats of a parameter and the devices of its copies; parameters of one format share buckets.

    Args:
        working: Format that forward reads.
        master: Format that the optimizer updates.
        wire: Format in which gradients travel.
        device: Where forward runs.
        step_device: Where the optimizer steps, unless the memory that moves its state says otherwise.
        is_trained: Whether the parameter required a gradient when it was laid out.
        is_listed: Whether an optimizer listed it.
        copies: The stages of a pipeline that hold a copy of the parameter each; empty where one stage has it. Buckets
            of the same copies must be laid out alike on each of the stages.
        ranks: The ranks that share the parameter, where they are others than those of the layout.
        is_table: Whether the parameter is large, and forward looks up some of its rows: only these have gradients.
        optimizer: Which of the model's optimizers steps on the parameter.
        partition: How that takes it: ``"flat"`` or ``"parameter"``, see `booster_zero.engine.partition`.
        by_matrix: Whether that updates matrices by themselves, so that work goes by their products.
    """

    working: torch.dtype
    master: torch.dtype
    wire: torch.dtype
    device: torch.device
    step_device: torch.device
    is_trained: bool
    is_listed: bool = True
    copies: tuple[int, ...] = ()
    ranks: ShardingRanks | None = None
    is_table: bool = False
    optimizer: int = 0
    partition: str = "flat"
    by_matrix: bool = False

    @property
    def has_copy(self) -> bool:
        """Whether the optimizer updates a copy instead of the working values."""
        return self.working != self.master or self.device != self.step_device


@dataclass(eq=False)
class BucketPiece(ParameterPiece):
    """The part of one parameter that this rank owns.

    Attributes:
        begin: Where the piece begins in this rank's slice of the bucket.
    """

    begin: int


def is_elementwise(piece: BucketPiece, key: str, value: Any) -> bool:
    """Return whether a part of an optimizer's state belongs to a piece element by element."""
    return isinstance(value, torch.Tensor) and is_cut(key, value, piece.values.shape)


def cut_pieces(
    plan: BucketPlan, parameters: Sequence[nn.Parameter], rank: int, values: Tensor
) -> Iterator[BucketPiece]:
    """Yield the pieces that a rank owns of a bucket.

    Args:
        plan: The bucket's layout.
        parameters: Its parameters, in the order of the plan.
        rank: Among those that share the bucket.
        values: What the optimizer updates of it, shape ``(length of the rank's slice,)``.
    """
    for slot, parameter in zip(plan.slots, parameters, strict=True):
        owned = plan.owned(slot, rank)
        if owned is not None:
            begin = slot.offset + owned[0] - plan.bounds[rank]
            part = values[begin : begin + owned[1] - owned[0]]
            if part.numel() == slot.numel:
                part = part.view(parameter.shape)
            yield BucketPiece(slot.index, parameter, *owned, nn.Parameter(part, part.is_floating_point()), begin)
