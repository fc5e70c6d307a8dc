"""`TensorShard`: which part of which tensor this rank holds.

Checkpoints, resharding, conversion, inspection, EMA and gradient access are all written once against
`TensorShard`. Pure data and index arithmetic: no files, no process groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, int], ...]
"""A half-open index range ``(start, stop)`` for each dimension of a tensor; ``()`` for a scalar."""


def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole tensor of the given shape."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of the part of a tensor that a box covers."""
    return tuple(stop - start for start, stop in box)


def box_numel(box: Box) -> int:
    """Return the number of elements that a box covers; 1 for the box of a scalar."""
    return math.prod(box_shape(box))


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """The part of one tensor of the user's model, or of its optimizer state, that this rank holds.

    A tensor may have several shards on one rank, as a fused q/k/v weight split over tensor parallel ranks has.

    Args:
        name: Fully qualified name as in the user's own model, before wrapping, LoRA prefixes and tensor splits.
        global_shape: Shape of the whole tensor in the user's model.
        dtype: Element type of the tensor as it is stored and written; equals ``data.dtype``.
        box: The index range of the global tensor that this shard was cut from.
        flat: Half-open range of the box, flattened row-major, that is held here. The whole box when ``None``.
        data: The values held here: shape ``box_shape(box)`` when ``flat`` is ``None``, otherwise
            ``(flat[1] - flat[0],)``. Reading sees the present values, and ``copy_`` into it changes the state.
        is_owner: Whether this rank writes this part. Of all replicas of a part, exactly one rank owns it.
        state: Name of the optimizer state, such as ``"exp_avg"`` or ``"master"``; ``None`` for the model's tensors.

    Raises:
        ConfigError: If the box does not fit the shape, the flat range does not fit the box, or the
            shape of ``data`` is not the one they say.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    data: torch.Tensor
    flat: tuple[int, int] | None = None
    is_owner: bool = True
    state: str | None = None

    def __post_init__(self) -> None:
        if len(self.box) != len(self.global_shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(self.box, self.global_shape, strict=True)
        ):
            msg = f"Box {self.box} of '{self.key}' does not fit into a tensor of shape {self.global_shape}."
            raise ConfigError(msg)
        if self.flat is None:
            expected = box_shape(self.box)
        else:
            start, stop = self.flat
            if not 0 <= start <= stop <= box_numel(self.box):
                numel = box_numel(self.box)
                msg = f"Flat range {self.flat} of '{self.key}' does not fit into its box of {numel} elements."
                raise ConfigError(msg)
            expected = (stop - start,)
        if tuple(self.data.shape) != expected:
            msg = f"The data of '{self.key}' has shape {tuple(self.data.shape)}; its box and flat range say {expected}."
            raise ConfigError(msg)
        if self.data.dtype != self.dtype:
            msg = f"The data of '{self.key}' has dtype {self.data.dtype}; the shard says {self.dtype}."
            raise ConfigError(msg)

    @property
    def key(self) -> str:
        """The tensor's name in a file: ``name`` for the model, ``name/state`` for the optimizer."""
        return self.name if self.state is None else f"{self.name}/{self.state}"

    @property
    def numel(self) -> int:
        """Number of elements held here."""
        return self.data.numel()

    @property
    def flat_range(self) -> tuple[int, int]:
        """The range of the flattened box held here, also where ``flat`` is the whole box."""
        return (0, box_numel(self.box)) if self.flat is None else self.flat
