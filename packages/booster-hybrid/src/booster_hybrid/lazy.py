"""Lazy models: layers are split and stages cut before there are values; then each rank makes or reads what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_core.state.naming import NamedTensors
from booster_core.state.shard import TensorShard, full_box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from booster_core.lazy import Recording
    from booster_core.plugin import BoostContext
    from booster_hybrid.tensor_parallel.split import Split


def fill_model(model: nn.Module, recording: Recording, splits: Mapping[str, Split], context: BoostContext) -> None:
    """Give a model that was split and cut its values: of parameters this rank's parts, of buffers all.

    One whole parameter exists at a time, and none of those whose values are a file's as they are.

    Args:
        model: The user's model; what it has lost to other stages is neither made nor read.
        recording: How its values are made.
        splits: The parameters that are split over tensor parallel ranks, by name.
        context: Device and ranks.

    Raises:
        LazyInitError: If files that values come from are gone, or have changed.

    Collective: every rank of the world: an error on one is raised on all.
    """
    recording.leave_out_absent()
    error: Exception | None = None
    try:
        recording.fill([*_with_memory(model, recording, splits, context.device)], context.device)
    except Exception as caught:  # noqa: BLE001 - carried to every rank by the next line
        error = caught
    context.coordinator.raise_together(error, name="boost")


def _with_memory(
    model: nn.Module, recording: Recording, splits: Mapping[str, Split], device: torch.device
) -> Iterator[TensorShard]:
    """Give the parameters that have no values memory for them, and yield where it lies in the whole tensors."""
    recorded, named = recording.name_of, NamedTensors.of(model).name_of
    for parameter in model.parameters():
        path = recorded.get(id(parameter))
        if path is None:
            continue
        split = splits.get(named[id(parameter)])
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        shape = tuple(parameter.shape) if split is None else split.global_shape
        boxes = (full_box(shape),) if split is None else split.boxes
        parts = [parameter.data] if split is None else split.parts(parameter.data)
        for box, part in zip(boxes, parts, strict=True):
            yield TensorShard(name=path, global_shape=shape, dtype=part.dtype, box=box, data=part)
