"""`GroupState`: what a replica group sends to one that comes back, and how that one takes it over.

Each rank sends what it owns, so that a group sends its state once. The ranks of the group that receives it exchange
the parts: its layout may differ, such as before the first backward of ZeRO. Nothing is written to files.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one shard holds, without its values: the arguments of `TensorShard`."""

    name: str
    state: str | None
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    box: tuple[tuple[int, int], ...]
    flat: tuple[int, int] | None

    @classmethod
    def of(cls, shard: TensorShard) -> _Part:
        return cls(
            name=shard.name,
            state=shard.state,
            global_shape=shard.global_shape,
            dtype=shard.dtype,
            box=shard.box,
            flat=shard.flat,
        )

    def shard(self, values: Tensor) -> TensorShard:
        return TensorShard(**vars(self), data=values)

    def empty(self) -> TensorShard:
        shape = box_shape(self.box) if self.flat is None else (self.flat[1] - self.flat[0],)
        return self.shard(torch.empty(shape, dtype=self.dtype))


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
            for part, values in _owned(shards):
                found.update(repr(part).encode())
                found.update(values.reshape(-1).view(torch.uint8).numpy().data)
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
        parts = self._coordinator.all_gather_object([part for part, _ in received["optimizer"]])
        metas: dict[str, dict[str, TensorMeta]] = {}
        for part in (part for of_rank in parts for part in of_rank):
            metas.setdefault(part.name, {})[part.state] = TensorMeta(shape=part.global_shape, dtype=part.dtype)
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

    def _fill(self, received: Sequence[tuple[_Part, Tensor]], shards: Callable[[], Iterable[TensorShard]]) -> None:
        """Write what the group's ranks have received into this rank's shards.

        Each tensor is put together from its parts on the host and cut as this rank holds it, one after the other.

        Collective: every rank of the group.
        """
        staged: dict[str, list[TensorShard]] = {}
        for shard in shards():
            staged.setdefault(shard.key, []).append(_Part.of(shard).empty())
        tables = self._coordinator.all_gather_object([part for part, _ in received])
        with self._coordinator.together("step"):
            _check_same({shard.key: shard for held in staged.values() for shard in held}, tables)
        sources: dict[str, list[tuple[int, int]]] = {}
        for rank, table in enumerate(tables):
            for index, part in enumerate(table):
                sources.setdefault(_key(part), []).append((rank, index))
        for key, held in sources.items():
            first = tables[held[0][0]][held[0][1]]
            whole = torch.empty(first.global_shape, dtype=first.dtype)
            for rank, index in held:
                own = received[index][1] if rank == self._coordinator.rank else None
                _insert(self._sent(own, tables[rank][index], rank), whole)
            for shard in staged.get(key, ()):
                copy_part(whole, shard)
        places = {key: iter(held) for key, held in staged.items()}
        with torch.no_grad():
            for shard in shards():
                shard.data.copy_(next(places[shard.key]).data)

    def _sent(self, own: Tensor | None, part: _Part, rank: int) -> TensorShard:
        """Return a part that a rank of the group has received."""
        shard = part.empty() if own is None else part.shard(own)
        if self._coordinator.world_size > 1 and shard.numel:
            dist.broadcast(shard.data.reshape(-1).view(torch.uint8), src=rank)
        return shard


def _key(part: _Part) -> str:
    return part.name if part.state is None else f"{part.name}/{part.state}"


def _owned(shards: Iterable[TensorShard]) -> Iterator[tuple[_Part, Tensor]]:
    """Yield a copy of each shard that this rank owns, on the host."""
    for shard in shards:
        if shard.is_owner:
            yield _Part.of(shard), shard.data.detach().to("cpu", copy=True).contiguous()


def _insert(shard: TensorShard, whole: Tensor) -> None:
    values = shard.data.reshape(-1)
    for region in regions_of(shard.box, shard.flat_range):
        part = values[region.start : region.start + region.numel]
        whole[slices_of(region.box)] = part.view(box_shape(region.box))


def _check_same(here: Mapping[str, TensorShard], tables: Sequence[Sequence[_Part]]) -> None:
    """Raise `ConfigError` unless what was sent covers the tensors that are here, in their shapes and formats."""
    sent: dict[str, _Part] = {}
    numel: dict[str, int] = {}
    for part in (part for table in tables for part in table):
        key = _key(part)
        sent[key] = part
        numel[key] = numel.get(key, 0) + sum(region.numel for region in regions_of(part.box, part.flat))
    for key, shard in here.items():
        found = sent.get(key)
        if found is None or (found.global_shape, found.dtype) != (shard.global_shape, shard.dtype):
            theirs = "no such tensor" if found is None else f"one of shape {found.global_shape} and {found.dtype}"
            msg = (
                f"'{key}' is of shape {shard.global_shape} and {shard.dtype} here; another replica group has {theirs}. "
                "Start all groups by the same script with the same options."
            )
            raise ConfigError(msg)
        if numel[key] != torch.Size(shard.global_shape).numel():
            msg = (
                f"Of '{key}' only {numel[key]} elements came from other replica groups. Start all groups with the same "
                "number of ranks."
            )
            raise ConfigError(msg)


def _reseed(text: str) -> None:
    seed = xxhash.xxh3_64_intdigest(text.encode()) >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global state is what a user's script draws from
    torch.manual_seed(seed)
