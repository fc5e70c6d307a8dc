"""One chunk: parameters that are gathered, released, moved and reduced together.

Each rank keeps its slice of the chunk (``shard``). While somebody uses a parameter the whole lies in a buffer::

    buffer    |  a  a  a  a  .  |  b  b  b  b  b  b |  c  c  .  |     parameters are views of it
    rank 0    |<------- shard of rank 0 ----->|
    rank 1                                    |<-- of rank 1 ------->|

Buffers live as long as anything refers to them, so that a chunk may be released at any time: what still reads it keeps
its own view. Parameters of a released chunk are placeholders: right in shape, format and device, and NaN all over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError
from booster_gemini.chunk.housed import HousedBucket
from booster_gemini.chunk.state import ChunkState, check_transition
from booster_gemini.memory.home import Role
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import Tensor, nn

    from booster_gemini.chunk.pool import BufferPool
    from booster_gemini.chunk.watch import ChangeWatch
    from booster_gemini.memory.home import Home
    from booster_runtime.collectives import Pending
    from booster_runtime.sharding import ShardingRanks
    from booster_zero.engine.bucket import Format
    from booster_zero.engine.partition import BucketPlan


class Chunk(HousedBucket):
    """Parameters that are gathered and reduced together.

    Args:
        plan: Layout.
        parameters: The model's parameters by number; those of the plan become placeholders.
        format: Formats and places.
        ranks: The ranks that share the chunk.
        pool: Lends memory for the whole.
        home: Keeps this rank's part.
        watch: Finds parameters that are changed by hand; ``None`` where nobody looks.
        valued: Numbers of the parameters whose values are taken; the others are zero at first.

    Attributes:
        pins: How many users there are that need the parameters to stay.
        stays: Whether the whole is kept after its use, until the parameters change.

    Collective: none; values are taken from this rank's parameters.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[int, nn.Parameter],
        format: Format,  # noqa: A002 - the noun for it
        ranks: ShardingRanks,
        *,
        pool: BufferPool,
        home: Home,
        watch: ChangeWatch | None,
        valued: Container[int],
    ) -> None:
        super().__init__(plan, parameters, format, ranks, home=home, valued=valued)
        self.state = ChunkState.SHARDED
        self.pins = 0
        self.stays = False
        self.buffer: Tensor | None = None
        self._pool = pool
        self._watch = watch
        self._pending: Pending | None = None
        self._shapes = [(tuple(parameter.shape), _strides(parameter.shape)) for parameter in self.parameters]
        filler = math.nan if format.working.is_floating_point else 0
        # One element of memory each: tied parameters are told by their addresses.
        self._placeholders = [
            torch.full((), filler, dtype=format.working, device=format.device).expand(shape)
            for shape, _ in self._shapes
        ]
        self._show_placeholders()

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters can be read."""
        return self.state is ChunkState.GATHERED

    # ---- the whole

    def start_gather(self) -> None:
        """Start bringing the whole here.

        Collective: every rank of the shard group, in the same order among chunks.
        """
        self._become(ChunkState.GATHERING)
        bounds, rank = self.plan.bounds, self.ranks.shard_rank
        self._fetch(Role.PARAM).wait()
        if self.ranks.shard_size == 1:
            self.buffer = self.shard
            return
        self.home.reserve(self.whole_bytes)
        self.buffer = self._pool.take(self.plan.numel, self.format.working, self.format.device)
        self.buffer[bounds[rank] : bounds[rank + 1]].copy_(self.shard)
        self._release(Role.PARAM, changed=False)
        self._pending = collectives.all_gather(self.buffer, bounds, self.ranks.shard_group)

    def finish_gather(self, names: Mapping[int, str]) -> None:
        """Wait for the whole, and let the parameters be views of it.

        Args:
            names: The parameters' names, for errors.

        Raises:
            ConfigError: If a parameter was given other memory by somebody else.

        Collective: none; the gather was entered when it was started.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        assert self.buffer is not None, "a gather that has been started has a buffer"
        for slot, parameter, placeholder in zip(self.plan.slots, self.parameters, self._placeholders, strict=True):
            if slot.numel and parameter.data_ptr() != placeholder.data_ptr():
                msg = (
                    f"Parameter '{names[slot.index]}' was given other memory after `boost`, by `.data = ...`, "
                    "`.to(...)` or the like. Change values with `booster.load_model`, or inside of "
                    "`with model.whole_parameters(writes=True)`."
                )
                raise ConfigError(msg)
        for slot, parameter, (shape, strides) in zip(self.plan.slots, self.parameters, self._shapes, strict=True):
            parameter.data = self.buffer.as_strided(shape, strides, slot.offset)
        self._become(ChunkState.GATHERED)
        if self._watch is not None:
            self._watch.take(self)

    def release(self) -> None:
        """Forget the whole. Whoever still reads views of it keeps its memory alive.

        Collective: none.
        """
        if self.state is ChunkState.SHARDED:
            return
        if self._watch is not None and self.is_gathered:
            self._watch.look(self)
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._become(ChunkState.SHARDED)
        self._show_placeholders()
        buffer, self.buffer = self.buffer, None
        if buffer is None:
            return
        if self.ranks.shard_size == 1:
            self._release(Role.PARAM, changed=False)
        else:
            self.home.free(self.whole_bytes)
            self._pool.give(buffer)

    @property
    def whole_bytes(self) -> int:
        """What the whole takes where ranks share it, in bytes."""
        return self.plan.numel * self.format.working.itemsize

    def mark_changed(self) -> None:
        """Say that the parameters have other values than before.

        A graph that was built with the former ones must not be run backward any more, as everywhere in torch.

        Collective: none.
        """
        torch.autograd.graph.increment_version(self.parameters)
        if self._watch is not None:
            self._watch.take(self)

    def write_back(self) -> None:
        """Take this rank's slice from the whole, in which somebody has changed values.

        Collective: none.
        """
        assert self.buffer is not None, "only what is gathered can have been changed"
        bounds, rank = self.plan.bounds, self.ranks.shard_rank
        with self.in_use(Role.PARAM, Role.OPTIM, changes=True):
            if self.ranks.shard_size > 1:
                self.shard.copy_(self.buffer[bounds[rank] : bounds[rank + 1]])
            self.take_working_values()

    def _show_placeholders(self) -> None:
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = placeholder
        if self._watch is not None:
            self._watch.take(self)

    def _become(self, state: ChunkState) -> None:
        check_transition(self.state, state)
        self.state = state


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
