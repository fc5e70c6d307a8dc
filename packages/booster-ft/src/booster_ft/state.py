"""`GroupState`: what a replica group sends to one that comes back, and how that one takes it over.

Each rank sends what it owns, so that a group sends its state once. The ranks of the group that receives it exchange
the parts: its layout may differ, such as before the first backward of ZeRO. Nothing is written to files.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from booster_core.checkpoint_io import GlobalPosition
from booster_core.errors import CheckpointError, ConfigError
from booster_core.state import (
    OptimizerInfo,
    TensorMeta,
    TensorShard,
    box_shape,
    copy_part,
    regions_of,
    scheduler_from_json,
    scheduler_to_json,
    slices_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from booster_core.checkpoint_io import TrainingObjects
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter

_WHERE = "the state of another replica group"


class GroupState:
    """The training state of this rank's part of a replica group.

    Args:
        adapter: Returns the view of the model and its optimizer.
        objects: Schedulers, loss scale and data loader.
        coordinator: Of the group's ranks.
        replica_id: The group's number, so that groups draw other random numbers.
    """

    def __init__(
        self,
        adapter: Callable[[], StateAdapter],
        objects: TrainingObjects,
        coordinator: DistCoordinator,
        replica_id: int,
    ) -> None:
        self._adapter, self._objects = adapter, objects
        self._coordinator, self._replica_id = coordinator, replica_id

    def capture(self) -> dict[str, Any]:
        """Return copies of what this rank owns. Not collective: ranks of one group may send to different ones."""
        adapter = self._adapter()
        scaler = self._objects.loss_scaler
        return {
            "model": list(_owned(adapter.model_shards())),
            "extra": dict(adapter.extra_state()),
            "optimizer": list(_owned(adapter.optimizer_shards())),
            "info": OptimizerInfo.of(adapter).entries(),
            "schedulers": [scheduler_to_json(each) for each in self._objects.schedulers],
            "loss_scaler": None if scaler is None else scaler.state_dict(),
            "dataloaders": [each.state_dict() for each in self._loaders()],
        }

    def digest(self) -> str:
        """Return a digest of what this rank owns of model and optimizer, and of the order of samples."""
        adapter, found = self._adapter(), xxhash.xxh3_64()
        for shards in (adapter.model_shards(), adapter.optimizer_shards()):
            for shard in _owned(shards):
                found.update(repr((shard.key, shard.global_shape, shard.box, shard.flat)).encode())
                found.update(shard.data.reshape(-1).view(torch.uint8).numpy().data)
        orders = [(each.state_dict().get("num_samples"), each.state_dict().get("seed")) for each in self._loaders()]
        found.update(repr((adapter.param_groups(), orders)).encode())
        return found.hexdigest()

    def restore(self, received: Mapping[str, Any], step: int, *, is_new: bool) -> None:
        """Take over what a rank of another group has captured.

        Args:
            received: What `capture` returned there.
            step: The step of that group.
            is_new: Whether this group has committed nothing yet, so that its data and random numbers are at their
                beginnings; those of a group that is only behind go on.

        Raises:
            ConfigError: On every rank, if that group trains another model.

        Collective: every rank of the group.
        """
        adapter = self._adapter()
        self._fill(received["model"], adapter.model_shards)
        adapter.load_extra_state(received["extra"])
        adapter.finish_load(model=True, optimizer=False)
        with self._coordinator.together("step"):
            self._check_optimizer(adapter, received)
        info = OptimizerInfo.merge(self._coordinator.all_gather_object(received["info"]))
        tables = self._coordinator.all_gather_object([_without_values(shard) for shard in received["optimizer"]])
        metas: dict[str, dict[str, TensorMeta]] = {}
        for shard in (shard for table in tables for shard in table):
            metas.setdefault(shard.name, {})[shard.state] = TensorMeta(shape=shard.global_shape, dtype=shard.dtype)
        adapter.prepare_optimizer_load(metas, info.scalars, info.groups)
        self._fill(received["optimizer"], adapter.optimizer_shards)
        adapter.finish_load(model=False, optimizer=True)
        for scheduler, content in zip(self._objects.schedulers, received["schedulers"], strict=True):
            scheduler_from_json(scheduler, content, _WHERE)
        if self._objects.loss_scaler is not None:
            self._objects.loss_scaler.load_state_dict(received["loss_scaler"])
        if is_new:
            for loader, position in zip(self._loaders(), received["dataloaders"], strict=True):
                loader.load_state_dict(position)
            _reseed(f"{torch.initial_seed()}/{self._replica_id}/{self._coordinator.rank}/{step}")

    def _check_optimizer(self, adapter: StateAdapter, received: Mapping[str, Any]) -> None:
        theirs = [set(group.params) for group in received["info"][0]]
        ours = [set(group.params) for group in adapter.param_groups()]
        kinds = [each["scheduler"] for each in received["schedulers"]]
        own_kinds = [type(each).__name__ for each in self._objects.schedulers]
        has_scale = self._objects.loss_scaler is not None
        if theirs != ours or kinds != own_kinds or has_scale != (received["loss_scaler"] is not None):
            msg = (
                "Another replica group has other parameter groups, schedulers or precision than this one. Start all "
                "groups by the same script with the same options."
            )
            raise ConfigError(msg)

    def _loaders(self) -> list[GlobalPosition]:
        """Return the loaders whose position can be told."""
        given = self._objects.dataloader
        found = []
        for loader in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(loader, GlobalPosition):
                try:
                    loader.state_dict()
                except CheckpointError:  # a sampler of the user's
                    continue
                found.append(loader)
        return found

    def _fill(self, received: Sequence[TensorShard], shards: Callable[[], Iterable[TensorShard]]) -> None:
        """Write what the group's ranks have received into this rank's shards.

        Each tensor is put together from its parts on the host and cut as this rank holds it, one after the other.

        Collective: every rank of the group.
        """
        staged: dict[str, list[TensorShard]] = {}
        for shard in shards():
            staged.setdefault(shard.key, []).append(_empty(shard))
        tables = self._coordinator.all_gather_object([_without_values(shard) for shard in received])
        sources: dict[str, list[tuple[int, int, TensorShard]]] = {}
        for rank, table in enumerate(tables):
            for index, shard in enumerate(table):
                sources.setdefault(shard.key, []).append((rank, index, shard))
        with self._coordinator.together("step"):
            for key, held in staged.items():
                _check_covered(held[0], [shard for _, _, shard in sources.get(key, ())])
        for key, parts in sources.items():
            whole = torch.empty(parts[0][2].global_shape, dtype=parts[0][2].dtype)
            for rank, index, shard in parts:
                self._insert(received[index] if rank == self._coordinator.rank else _empty(shard), rank, whole)
            for shard in staged.get(key, ()):
                copy_part(whole, shard)
        places = {key: iter(held) for key, held in staged.items()}
        with torch.no_grad():
            for shard in shards():
                shard.data.copy_(next(places[shard.key]).data)

    def _insert(self, part: TensorShard, rank: int, whole: Tensor) -> None:
        """Write a part that a rank of the group has received into the whole tensor, on every rank."""
        values = part.data.reshape(-1)
        if self._coordinator.world_size > 1 and part.numel:
            dist.broadcast(values.view(torch.uint8), src=rank)
        for region in regions_of(part.box, part.flat_range):
            inside = values[region.start : region.start + region.numel]
            whole[slices_of(region.box)] = inside.view(box_shape(region.box))


def _owned(shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
    """Yield a copy of each shard that this rank owns, on the host."""
    for shard in shards:
        if shard.is_owner:
            yield replace(shard, data=shard.data.detach().to("cpu", copy=True).contiguous())


def _without_values(shard: TensorShard) -> TensorShard:
    return replace(shard, data=shard.data.to("meta"))


def _empty(shard: TensorShard) -> TensorShard:
    return replace(shard, data=torch.empty(shard.data.shape, dtype=shard.dtype))


def _check_covered(shard: TensorShard, parts: Sequence[TensorShard]) -> None:
    """Raise `ConfigError` unless what was sent is the tensor that is here, and all of it."""
    there = {(part.global_shape, part.dtype) for part in parts}
    numel = sum(part.numel for part in parts)
    if there != {(shard.global_shape, shard.dtype)} or numel != math.prod(shard.global_shape):
        theirs = " and ".join(f"shape {shape} and {dtype}" for shape, dtype in there) or "none of this name"
        msg = (
            f"'{shard.key}' is of shape {shard.global_shape} and {shard.dtype} here; from another replica group came "
            f"{numel} elements of {theirs}. Start all groups by the same script, with the same options and number of "
            "ranks."
        )
        raise ConfigError(msg)


def _reseed(text: str) -> None:
    seed = xxhash.xxh3_64_intdigest(text.encode()) >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global state is what a user's script draws from
    torch.manual_seed(seed)
