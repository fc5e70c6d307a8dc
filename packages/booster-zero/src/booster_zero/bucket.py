"""One bucket: parameters that lie flat in one buffer, and this rank's slice of it, which the optimizer updates.

Two ranks, three parameters; the cut falls into ``b``::

    flat      |  a  a  a  a  .  |  b  b  b  b  b  b |  c  c  .  |     working values, whole on every rank
    rank 0    |<--------- slice of rank 0 --->|                       pieces: a, start of b
    rank 1                                    |<--- of rank 1 ------>|     pieces: rest of b, c

Parameters are views of ``flat``, so a gather of slices lands in them. ``values`` is what the optimizer updates: the
slice itself, or a copy of it in another format (fp32 masters) or memory (the host).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError
from booster_runtime import collectives
from booster_runtime.collectives import Pending
from booster_runtime.sharding import is_cut
from booster_zero.engine.bucket import ShardedBucket
from booster_zero.engine.lane import in_ram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from booster_runtime.sharding import ShardingRanks, State
    from booster_zero.engine.bucket import Format, Piece
    from booster_zero.engine.partition import BucketPlan
    from booster_zero.room import Room


class Bucket(ShardedBucket):
    """Parameters that are reduced and gathered together.

    Args:
        plan: Layout.
        parameters: The model's parameters by number; those of the plan become views of this bucket.
        format: Formats and places.
        ranks: The ranks that share the bucket.
        room: Where what the optimizer updates and keeps is to lie.

    Collective: none; values are taken from this rank's parameters.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[int, nn.Parameter],
        format: Format,  # noqa: A002 - the noun for it
        ranks: ShardingRanks,
        *,
        room: Room,
    ) -> None:
        self._room = room
        self._files: dict[tuple[str, torch.dtype], Tensor] = {}
        self.flat = torch.zeros(plan.numel, dtype=format.working, device=format.device)
        low, high = plan.bounds[ranks.shard_rank], plan.bounds[ranks.shard_rank + 1]
        self.own = self.flat[low:high]
        values = room.zeros(high - low, format.master, format.home, format.device) if format.has_copy else self.own
        super().__init__(plan, parameters, format, ranks, values)
        for piece in self.pieces:
            part = piece.parameter.data.reshape(-1)[piece.start : piece.stop]
            piece.values.data.copy_(part.view(piece.values.shape))
        for slot, parameter in zip(plan.slots, self.parameters, strict=True):
            place = self.flat[slot.offset : slot.offset + slot.numel]
            place.copy_(parameter.data.reshape(-1))
            parameter.data = place.view(parameter.shape)
        self._versions: list[int] = []
        self.note_versions()

    @property
    def adds_at_once(self) -> bool:
        """Whether gradients need not be kept until the whole bucket's have come: what they are added to lies here."""
        return self.is_all_here

    def note_versions(self) -> None:
        """Count the working values as those that the optimizer knows of."""
        self._versions = [parameter._version for parameter in self.parameters]  # noqa: SLF001 - as autograd does

    def notice_changes(self, names: Mapping[int, str]) -> None:
        """Take in what somebody else has written into the parameters since the last update, such as loaded values.

        Raises:
            ConfigError: If a parameter has left the bucket: updates would not reach it any more.
        """
        for slot, parameter in zip(self.plan.slots, self.parameters, strict=True):
            expected = self.flat.data_ptr() + slot.offset * self.flat.element_size()
            if slot.numel and parameter.data_ptr() != expected:
                msg = (
                    f"Parameter '{names[slot.index]}' was given other memory after `boost`, by `.data = ...`, "
                    "`.to(...)` or the like. Copy values into it in place, for example with `parameter.copy_(values)`."
                )
                raise ConfigError(msg)
        known = self._versions
        self.note_versions()
        if self.format.has_copy and known != self._versions:
            self.take_working_values()

    def take_working_values(self) -> None:
        """Bring the optimizer's values up to date with this rank's working values.

        Where a master rounds to the working value that is there, it is the truer of the two, and stays.
        """
        if self.format.has_copy:
            own = self.own.to(self.values.device)
            is_stale = self.values.to(own.dtype) != own
            self.values.copy_(torch.where(is_stale, own.to(self.values.dtype), self.values))

    def publish(self) -> Pending:
        """Start bringing what the optimizer updated into every rank's parameters.

        Collective: the shard group.
        """
        bounds, group = self.plan.bounds, self.ranks.shard_group
        if self.lane is None:
            if self.format.has_copy:
                self.own.copy_(self.values)
            return collectives.all_gather(self.flat, bounds, group)
        values = self.values
        if values.dtype != self.own.dtype:
            values = in_ram(values.numel(), self.own.dtype, values.device, self.own.device).copy_(values)
        with self.lane.entered():
            self.own.copy_(values, non_blocking=True)
            copied = self.lane.mark()
            gathered = collectives.all_gather(self.flat, bounds, group)

        def finish() -> None:
            if copied is not None:
                copied.synchronize()  # `values` may be changed again

        return Pending([gathered], finish, keep=values)

    def vacate(self) -> None:
        """Let go of the working values, all of which lie in other buckets now; copies of the optimizer's stay."""
        self.flat = self.own = self.flat.new_empty(0)
        if self.format.has_copy:
            return
        self.values = self.own
        for piece in self.pieces:  # which the optimizer's state is listed by, until it has moved too
            piece.values.data = self.own.new_empty(()).expand(piece.values.shape)

    # ---- what the optimizer keeps

    def state_room(self, piece: Piece, key: str, dtype: torch.dtype) -> Tensor:
        """Return memory for a piece's part of an elementwise state, in the shape of the piece's values; not filled."""
        filed = self._filed(key, dtype)
        return super().state_room(piece, key, dtype) if filed is None else self.slice_of(filed, piece)

    def house(self, states: Mapping[int, State]) -> None:
        """Move what the optimizer has made in RAM, of the pieces' elementwise state, to where it is to lie.

        What finds no room there stays.

        Args:
            states: By parameter, what the optimizer keeps; entries are replaced.
        """
        if not self._room.is_on_disk:
            return
        for piece in self.pieces:
            state = states.get(piece.index, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or not is_cut(key, value, piece.values.shape):
                    continue
                filed = self._filed(key, value.dtype)
                if filed is None or filed.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                    continue
                state[key] = self.slice_of(filed, piece).copy_(value)

    def _filed(self, key: str, dtype: torch.dtype) -> Tensor | None:
        """Return the file that holds a state of all of this rank's pieces, end to end; ``None`` where there is none."""
        if not self._room.is_on_disk or self.format.home.type != "cpu":
            return None
        known = self._files.get((key, dtype))
        if known is None:
            known = self._room.filed(self.values.numel(), dtype)
            if known is not None:
                self._files[key, dtype] = known
        return known
