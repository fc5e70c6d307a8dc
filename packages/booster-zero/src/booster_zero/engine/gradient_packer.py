"""What a rank sends of a bucket's gradients: as few copies and messages as their sizes allow."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from booster_zero.engine.partition import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from booster_zero.engine.formats import Format
    from booster_zero.engine.partition import BucketPlan, Slot

_SMALL_NUMEL = 1 << 13
"""Gradients below this many elements travel together: a message costs more than a copy of them."""


class GradientPacker:
    """The gradients of one bucket, as they are sent.

    Gradients are given by parameter, flat and in the wire format; zero where there is none.

    Args:
        plan: The bucket's layout.
        format: Its formats and devices.
    """

    def __init__(self, plan: BucketPlan, format: Format) -> None:  # noqa: A002 - the noun for it
        self._wire, self._device = format.wire, format.device
        self._padding: dict[int, Tensor] = {}  # the few elements between parameters
        self._whole = _with_padding(plan.slots, plan.numel)
        runs = [
            list(run)
            for is_small, group in itertools.groupby(plan.slots, lambda slot: slot.numel < _SMALL_NUMEL)
            for run in ([group] if is_small else [[slot] for slot in group])
        ]
        ends = [plan.numel if run[-1] is plan.slots[-1] and len(runs) == 1 else 0 for run in runs]
        self._runs = [(run[0].offset, _with_padding(run, end)) for run, end in zip(runs, ends, strict=True)]

    def parts(self, gradients: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Return the bucket's gradient in parts: large ones as they are, runs of small ones joined."""
        return [(offset, self._joined(run, gradients)) for offset, run in self._runs]

    def joined(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """Return the gradient in one tensor."""
        return self._joined(self._whole, gradients)

    def _joined(self, run: Sequence[tuple[int, int]], gradients: Mapping[int, Tensor]) -> Tensor:
        """Return neighbouring gradients and the padding between them in one tensor, which one call copies."""
        pieces = [gradients[index] if index in gradients else self._zeros(numel) for index, numel in run]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _zeros(self, numel: int) -> Tensor:
        kept = self._padding.get(numel)
        if kept is None:
            kept = torch.zeros(numel, dtype=self._wire, device=self._device)
            if numel < ALIGNMENT:
                self._padding[numel] = kept
        return kept


def _with_padding(slots: Sequence[Slot], end: int) -> list[tuple[int, int]]:
    """Return numbers and sizes of neighbouring parameters, and -1 and the size for what is between them and the end."""
    found, at = [], slots[0].offset
    for slot in slots:
        if slot.offset > at:
            found.append((-1, slot.offset - at))
        found.append((slot.index, slot.numel))
        at = slot.offset + slot.numel
    return [*found, (-1, end - at)] if end > at else found
