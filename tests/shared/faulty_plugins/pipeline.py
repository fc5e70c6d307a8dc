"""Mutants of `ReferencePipelinePlugin`, with one fault each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reference_plugins import ReferencePipelinePlugin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class DropsLastMicrobatch(ReferencePipelinePlugin):
    """Trains without a batch's last samples."""

    def cut(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return all microbatches but one."""
        return super().cut(batch)[:1]


class TakesOneBatchAhead(ReferencePipelinePlugin):
    """Takes a batch that it does not train on."""

    def take(self, data_iter: Iterator[Any]) -> dict[str, Tensor]:
        """Return a batch, and take the one after it."""
        batch = super().take(data_iter)
        next(data_iter, None)
        return batch


class ReversesOutputs(ReferencePipelinePlugin):
    """Returns outputs in the order in which backward ends."""

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs, the last microbatch's first."""
        return super().join(outputs[::-1])
