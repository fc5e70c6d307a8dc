"""`GroupState`: what a replica group sends to one that comes back, and how that one takes it over.

Each rank sends what it owns, so that a group sends its state once. The ranks of the group that receives it exchange
the parts: its layout may differ, such as before the first backward of ZeRO. Nothing is written to files.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from booster_core.checkpoint_io import GlobalPosition
from booster_core.errors import CheckpointError, ConfigError, shorten
from booster_core.ranks import seed_everything
from booster_core.state import (
    OptimizerInfo,
    TensorMeta,
    TensorShard,
    as_bytes,
    copy_part,
    scheduler_from_json,
    scheduler_to_json,
)
from booster_runtime.whole_tensors import assembled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from booster_core.precision import DynamicLossScaler
    from booster_core.ranks import DistCoordinator
    from booster_core.state import StateAdapter


@dataclass(frozen=True, eq=False)
class GroupState:
    """The training state of this rank's part of a replica group.

    Args:
        adapter: Returns the view of the model and its optimizer.
        loss_scaler: The optimizer's.
        schedulers: Learning rate schedulers.
        loaders: Data loaders.
        coordinator: Of the group's ranks.
        replica_id: The group's number, so that groups draw other random numbers.
    """

    adapter: Callable[[], StateAdapter]
    loss_scaler: DynamicLossScaler | None
    schedulers: Sequence[LRScheduler]
    loaders: Sequence[DataLoader[Any]]
    coordinator: DistCoordinator
    replica_id: int

    def capture(self) -> dict[str, Any]:
        """Return copies of what this rank owns. Not collective: ranks of one group may send to different ones."""
        adapter, scaler = self.adapter(), self.loss_scaler
        return {
            "model": list(_owned(adapter.model_shards())),
            "extra": dict(adapter.extra_state()),
            "optimizer": list(_owned(adapter.optimizer_shards())),
            "info": OptimizerInfo.of(adapter).entries(),
            "kinds": self._kinds(adapter),
            "schedulers": [scheduler_to_json(each) for each in self.schedulers],
            "loss_scaler": None if scaler is None else scaler.state_dict(),
            "dataloaders": [each.state_dict() for each in self._positions()],
        }

    def digest(self) -> str:
        """Return a digest of what this rank owns of model and optimizer, and of the order of samples."""
        adapter, found = self.adapter(), xxhash.xxh3_64()
        for shard in chain(_owned(adapter.model_shards()), _owned(adapter.optimizer_shards())):
            found.update(repr((shard.key, shard.global_shape, shard.box, shard.flat)).encode())
            found.update(as_bytes(shard.data.contiguous()))
        positions = [each.state_dict() for each in self._positions()]
        orders = [(each.get("num_samples"), each.get("seed")) for each in positions]
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
        adapter = self.adapter()
        with self.coordinator.together("step"):
            if received["kinds"] != self._kinds(adapter):
                msg = (
                    "Another replica group has other parameter groups, schedulers or precision than this one. Start "
                    "all groups by the same script with the same options."
                )
                raise ConfigError(msg)
        self._fill(received["model"], adapter.model_shards)
        adapter.load_extra_state(received["extra"])
        adapter.finish_load(model=True, optimizer=False)
        own = [(each.name, each.state, each.global_shape, each.dtype) for each in received["optimizer"]]
        metas = defaultdict[str, dict[str, TensorMeta]](dict)
        for name, state, shape, dtype in chain.from_iterable(self.coordinator.all_gather_object(own)):
            metas[name][state] = TensorMeta(shape=shape, dtype=dtype)
        info = OptimizerInfo.merge(self.coordinator.all_gather_object(received["info"]))
        adapter.prepare_optimizer_load(info.with_own_dtypes(metas), info.scalars, info.groups)
        self._fill(received["optimizer"], adapter.optimizer_shards)
        adapter.finish_load(model=False, optimizer=True)
        for scheduler, content in zip(self.schedulers, received["schedulers"], strict=True):
            scheduler_from_json(scheduler, content, "the state of another replica group")
        if self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(received["loss_scaler"])
        if is_new:
            for loader, position in zip(self._positions(), received["dataloaders"], strict=True):
                loader.load_state_dict(position)
            place = f"{torch.initial_seed()}/{self.replica_id}/{self.coordinator.rank}/{step}"
            seed_everything(xxhash.xxh32_intdigest(place.encode()))

    def _kinds(self, adapter: StateAdapter) -> list[object]:
        """Return what is the same in all groups that train alike."""
        schedulers = [type(each).__name__ for each in self.schedulers]
        groups = [sorted(group.params) for group in adapter.param_groups()]
        return [groups, schedulers, self.loss_scaler is not None]

    def _positions(self) -> Iterator[GlobalPosition]:
        """Yield the loaders whose position can be told."""
        for loader in self.loaders:
            if isinstance(loader, GlobalPosition):
                try:
                    loader.state_dict()
                except CheckpointError:  # a sampler of the user's
                    continue
                yield loader

    def _fill(self, received: Sequence[TensorShard], shards: Callable[[], Iterable[TensorShard]]) -> None:
        """Write what the group's ranks have received into this rank's shards.

        Each tensor is put together from its parts on the host and cut as this rank holds it, one after the other.

        Raises:
            ConfigError: On every rank, before anything is written, if that is not all of the same tensors.

        Collective: every rank of the group.
        """
        staged = defaultdict[str, list[TensorShard]](list)
        for shard in shards():
            staged[shard.key].append(replace(shard, data=torch.empty(shard.data.shape, dtype=shard.dtype)))
        different = set(staged)
        for key, whole in assembled(received, torch.device("cpu"), self.coordinator):
            for shard in staged[key]:
                if (shard.global_shape, shard.dtype) == (tuple(whole.shape), whole.dtype):
                    copy_part(whole, shard)
                    different.discard(key)
        with self.coordinator.together("step"):
            if different:
                msg = (
                    f"Another replica group has no {shorten(sorted(different))} of the shape and dtype that this one "
                    "has. Start all groups by the same script, with the same options and number of ranks."
                )
                raise ConfigError(msg)
        for shard in shards():
            shard.data.detach().copy_(staged[shard.key].pop(0).data)


def _owned(shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
    """Yield a copy of each shard that this rank owns, on the host."""
    for shard in shards:
        if shard.is_owner:
            yield replace(shard, data=shard.data.detach().to("cpu", copy=True).contiguous())
