"""The parts of parameters that a rank owns of a bucket, and which state goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from booster_runtime.sharding import ParameterPiece, is_cut


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
