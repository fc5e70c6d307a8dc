"""Lazy models: chunks are laid out for tensors without values, and each rank then fills its slices of them alone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from booster_core.state import TensorShard, full_box
from booster_runtime.sharding import raised_on_all

if TYPE_CHECKING:
    from torch import nn

    from booster_core.plugin import BoostContext
    from booster_runtime.lazy import Recording
    from booster_zero.engine import Bucket
    from booster_zero.gathering import ChunkManager


def fill_chunks(model: nn.Module, recording: Recording, manager: ChunkManager, context: BoostContext) -> None:
    """Give a model in chunks its values: this rank's slices of parameters, wherever they are, and all buffers.

    One chunk is in memory at a time besides those that stay there.

    Args:
        model: The user's model.
        recording: How its values are made.
        manager: Its chunks.
        context: Device and ranks.

    Raises:
        CheckpointError: If a file that values come from can't be read.

    Collective: every rank of the world: an error on one is raised on all.
    """
    chunk_of: dict[str, Bucket] = {}
    pieces = manager.layout.pieces()
    shards = []
    lazy = recording.name_of
    for index, parameter in enumerate(model.parameters()):
        name = lazy.get(id(parameter))
        if name is None:
            continue
        chunk_of[name] = chunk = manager.chunk_of(index)
        piece = pieces.get(index)
        shape = tuple(parameter.shape)
        flat: tuple[int, int] | None = (0, 0)
        data = torch.empty(0, dtype=chunk.format.master)
        if piece is not None:
            flat = None if piece.is_whole else (piece.start, piece.stop)
            data = piece.values
        shards.append(
            TensorShard(name=name, global_shape=shape, dtype=data.dtype, box=full_box(shape), flat=flat, data=data)
        )
    with raised_on_all("boost", context.device), _Present() as present:
        recording.fill(shards, context.device, before_write=lambda shard: present.come(chunk_of[shard.name]))


class _Present(contextlib.ExitStack):
    """Keeps one chunk in use to be written to: the one that came last."""

    def __init__(self) -> None:
        super().__init__()
        self._chunk: Bucket | None = None

    def come(self, chunk: Bucket) -> None:
        """Have this chunk in use, and no other."""
        if chunk is not self._chunk:
            self.close()
            self.enter_context(chunk.in_use(changes=True))
            self.callback(chunk.round_values)
            self._chunk = chunk
