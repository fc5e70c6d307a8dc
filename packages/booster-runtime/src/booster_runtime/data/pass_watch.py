"""Noticing that ranks follow different epochs of a loader, so that some samples are seen twice and others never.

A batch that is taken on one rank only, to look at it, counts as an epoch that was left early there. Ranks count
themselves in the store when a pass gets to its second batch, and look a few batches later, without waiting for anybody:
where they train in step, all have counted by then, and all raise at the same batch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError
from booster_core.ranks import current_world

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public

_COUNTED_AT = 2


class PassWatch:
    """Compares the epochs that ranks' passes over a loader follow.

    Args:
        store: What ranks share.
        prefix: Where in the store; the same on every rank.
        world_size: Number of ranks.
        cleans: Whether this rank removes what is no longer needed.
    """

    def __init__(self, store: Store, prefix: str, *, world_size: int, cleans: bool) -> None:
        self._store = store
        self._prefix = prefix
        self._world_size = world_size
        self._cleans = cleans
        self._num_passes = 0
        self._is_settled = True
        self._keys: list[tuple[str, str]] = []

    def at_batch(self, number: int, epoch: int) -> None:
        """Count a batch of a pass, the first being number 1.

        Raises:
            ConfigError: If all ranks are in a pass, and some follow another epoch.

        Collective: none.
        """
        if number < _COUNTED_AT or number & (number - 1):  # ever more seldom
            return
        num_same = num_all = self._world_size
        with contextlib.suppress(RuntimeError):  # the store's errors: what follows will meet them, too
            if number == _COUNTED_AT:
                self._begin(epoch)
            elif not self._is_settled:
                every, same = self._keys[-1]
                num_all, num_same = self._store.add(every, 0), self._store.add(same, 0)
                self._is_settled = num_all == self._world_size
        if num_all == self._world_size and num_same < num_all:
            msg = (
                f"Ranks follow different epochs of the data loader: this one follows epoch {epoch}, as do {num_same} "
                f"of {num_all} ranks. Taking a batch begins an epoch: take one on every rank or on none, or call "
                "`set_epoch` of the loader on every rank before the loop."
            )
            raise ConfigError(msg)

    def _begin(self, epoch: int) -> None:
        self._num_passes += 1
        base = f"{self._prefix}/{self._num_passes}"
        self._keys.append((f"{base}/all", f"{base}/epoch{epoch}"))
        for key in reversed(self._keys[-1]):  # whoever sees that all have counted sees in which epoch, too
            self._store.add(key, 1)
        self._is_settled = False
        if len(self._keys) > 2:  # all ranks have looked at the pass before the last
            for key in self._keys.pop(0):
                if self._cleans:
                    self._store.delete_key(key)


def watch_passes(world_size: int) -> PassWatch | None:
    """Return a watch for a loader that is boosted now; ``None`` on a single rank.

    Collective: none, but every rank boosts equally many loaders.
    """
    world = current_world()
    if world_size < 2 or world.store is None:
        return None
    number = world.store.add(f"passes/loaders/{world.rank}", 1)
    return PassWatch(world.store, f"passes/{number}", world_size=world.world_size, cleans=world.rank == 0)
