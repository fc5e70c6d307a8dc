"""What a rank sends of a bucket's gradients: as few copies and messages as their sizes allow."""

from __future__ import annotations

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


class Outgoing:
    """The gradients of one bucket, as they are sent.

    Gradients are given by parameter, flat and in the wire format; zero where there is none.

    Args:
        plan: The bucket's layout.
        format: Its formats and devices.
    """

    def __init__(self, plan: BucketPlan, format: Format) -> None:  # noqa: A002 - the noun for it
        self._plan = plan
        self._wire, self._device = format.wire, format.device
        self._padding: dict[int, Tensor] = {}  # the few elements between parameters

    def parts(self, gradients: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Return the bucket's gradient in parts: large ones as they are, runs of small ones joined."""
        parts: list[tuple[int, Tensor]] = []
        run: list[Slot] = []
        for slot in (*self._plan.slots, None):
            if slot is not None and slot.numel < _SMALL_NUMEL:
                run.append(slot)
                continue
            if run:
                parts.append((run[0].offset, self.joined(run, gradients)))
                run = []
            if slot is not None:
                part = gradients.get(slot.index)
                parts.append((slot.offset, self._zeros(slot.numel) if part is None else part))
        return parts

    def joined(self, slots: Sequence[Slot], gradients: Mapping[int, Tensor]) -> Tensor:
        """Return the gradients of neighbouring slots in one tensor; of all slots with the padding at the end.

        One call copies them all. What fills the whole tensor is returned as it is.
        """
        at = slots[0].offset
        end = slots[-1].offset + slots[-1].numel
        if len(slots) == len(self._plan.slots):
            end = self._plan.numel
        pieces: list[Tensor] = []
        for slot in slots:
            if slot.offset > at:
                pieces.append(self._zeros(slot.offset - at))
            gradient = gradients.get(slot.index)
            pieces.append(self._zeros(slot.numel) if gradient is None else gradient)
            at = slot.offset + slot.numel
        if end > at:
            pieces.append(self._zeros(end - at))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _zeros(self, numel: int) -> Tensor:
        kept = self._padding.get(numel)
        if kept is None:
            kept = torch.zeros(numel, dtype=self._wire, device=self._device)
            if numel < ALIGNMENT:
                self._padding[numel] = kept
        return kept
