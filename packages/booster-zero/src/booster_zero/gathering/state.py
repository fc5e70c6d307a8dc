"""The state of chunks as shards: this rank's slices of them, streamed from where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.state import MASTER, NamedTensors, TensorShard, balanced_shards
from booster_runtime.sharding import piece_shard
from booster_zero.engine.home import Role
from booster_zero.engine.state import ZeroStateAdapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor

    from booster_core.ranks import DistCoordinator
    from booster_core.state import Replica
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.engine import ShardedEngine
    from booster_zero.gathering.model import GatheringModel


class ChunkStateAdapter(ZeroStateAdapter):
    """Shows a model whose parameters and optimizer state are split over ranks.

    Args:
        model: The boosted model.
        sharded: Its trained parameters; ``None`` where there are none.
        coordinator: Tells rank and number of ranks, of those that share the chunks.
    """

    def __init__(
        self, model: GatheringModel, sharded: ShardedEngine | None, coordinator: DistCoordinator | Replica
    ) -> None:
        super().__init__(model, sharded, coordinator)
        self._manager = model.manager
        self._module = model.unwrap()
        self._coordinator = coordinator

    @property
    def keeps_values(self) -> bool:
        """Whether the home never moves chunks between memories."""
        return not self._manager.home.moves

    def model_shards(self) -> Iterator[TensorShard]:
        for chunk in self._manager.layout.buckets:
            if not chunk.pins:
                chunk.release()  # what is written to the shard must show at the next use
            with chunk.in_use(Role.PARAM, changes=True):
                yield from self._pieces(chunk, chunk.own)
        yield from self._buffers()

    def export_shards(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[TensorShard]:
        with_masters = {id(chunk) for chunk in self.buckets_to_export(dtypes)}
        for chunk in self._manager.layout.buckets:
            if id(chunk) in with_masters:
                with chunk.in_use(changes=True):
                    chunk.take_working_values()  # of parameters that the script has written since the last step
                    yield from self._pieces(chunk, chunk.values)
            else:
                with chunk.in_use(Role.PARAM, changes=True):
                    yield from self._pieces(chunk, chunk.own)
        yield from self._buffers()

    def _pieces(self, chunk: Bucket, values: Tensor) -> Iterator[TensorShard]:
        for piece in chunk.pieces:
            name, part = self._manager.names[piece.index], chunk.slice_of(values, piece)
            yield piece_shard(name, None, piece, part, is_owner=chunk.ranks.replica_rank == 0)

    def _buffers(self) -> Iterator[TensorShard]:
        named = NamedTensors.of(self._module)
        names = named.buffers
        # Every rank has all of them.
        buffers = [(name, None, tensor) for name, tensor in named.tensors.items() if name in names]
        yield from balanced_shards(buffers, self._coordinator.rank, self._coordinator.world_size, of_first=names)

    def parameter_as_master(self, index: int) -> Iterator[TensorShard]:
        chunk = self._manager.chunk_of(index)
        with chunk.in_use(Role.PARAM, changes=True):
            piece = chunk.piece_of.get(index)
            if piece is not None:
                yield self.shard_of(piece, MASTER, piece.values, is_owner=False)

    def finish_load(self, *, model: bool, optimizer: bool) -> None:
        chunks = self._manager.layout.buckets
        if model:
            for chunk in chunks:
                with chunk.in_use(changes=True):
                    chunk.take_working_values()
        if optimizer:
            for chunk in self.buckets_with_masters():
                with chunk.in_use(changes=True):
                    chunk.round_values()
        self.taken_as_parameters = set()
        self._manager.release_all()
        for chunk in chunks:
            chunk.mark_changed()
