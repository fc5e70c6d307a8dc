"""Blocks of an accelerator that are also used on its host: by an optimizer whose state is there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from booster_gemini.memory.tiered import TieredHome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from booster_gemini.memory.buffers import Buffers
    from booster_gemini.memory.disk import DiskStore
    from booster_gemini.memory.ferry import Ferry
    from booster_gemini.memory.record_file import MemoryRecord
    from booster_gemini.placement.policy import PlacementPolicy
    from booster_zero.engine import Key


class DeviceHome(TieredHome):
    """Keeps blocks on an accelerator, its host and a disk.

    Args:
        rooms: The accelerator's memory, and its host's.
        store: The disk, if it is used.
        policy: Decides what is where.
        record: Where to write what happens, for pictures.
        ferry: Copies between the two memories.
    """

    def __init__(
        self,
        rooms: list[Buffers],
        store: DiskStore | None,
        policy: PlacementPolicy,
        record: MemoryRecord | None = None,
        *,
        ferry: Ferry,
    ) -> None:
        super().__init__(rooms, store, policy, record, ferry)
        self._up = ferry.up
        self._stays: dict[Key, bool] = {}  # of the blocks that there are, as far as it was asked for

    def add(self, key: Key, flat: Tensor, rebind: Callable[[Tensor | None], None]) -> None:
        """Take over a block; see `Home.add`."""
        self._stays.clear()
        super().add(key, flat, rebind)

    def drop(self, key: Key) -> None:
        """Forget a block altogether; see `Home.drop`."""
        self._stays.clear()
        super().drop(key)

    @contextlib.contextmanager
    def lifting(self, key: Key) -> Iterator[None]:
        """Let copies from the host into a block overlap with computation; see `Home.lifting`."""
        block = self._blocks[key]
        if not self._is_on_device(block):
            yield
            return
        with self._up.after_compute():
            yield
            block.ready = self._up.record()

    def use_below(self, key: Key) -> Tensor | None:
        """Begin a use of a block on the host; see `Home.use_below`."""
        block = self._blocks[key]
        if key not in self._stays:
            self._stays[key] = self._policy.may_stay(key, self.sizes())
        if self._stays[key] or not block.is_below:
            return None
        if block.buffer is not None:
            self._unbind(block)
            self._drop(block)
        block.users += 1
        return block.flat_below()

    def release_below(self, key: Key) -> None:
        """End a use on the host; see `Home.release_below`."""
        block = self._blocks[key]
        assert block.buffer is None, "nobody uses on the device what is written to on the host"
        block.users -= 1
