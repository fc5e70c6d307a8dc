"""Noticing that ranks train on the same batch, or follow different epochs of a loader.

Each rank leaves in the ranks' store what it has seen, and looks for what the others left at later batches, ever more
rarely. No rank waits for another.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.log import ANY_RANK, log
from booster_core.ranks import current_world, digest, name_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public
    from torch.utils.hooks import RemovableHandle

_MOST_ELEMENTS = 4096
"""How many elements of each tensor are looked at, spread over it."""
_MOST_BATCHES = 1024
"""After so many batches rank 0 stops looking for what the others left."""
_COUNTED_AT = 2
"""The batch of a pass at which ranks count themselves: a batch taken only to look at it is no pass."""


def watch_first_batch(model: nn.Module, *, index: int, size: int) -> None:
    """Compare the first batches that data parallel ranks train a boosted model on, and warn if some are equal.

    Args:
        model: The boosted model; its next training forwards are looked at.
        index: Index of this rank among the ranks that see different samples.
        size: Number of these ranks.

    Collective: none, but every rank boosts equally many models.
    """
    store = _part_of_store("first_batch") if size > 1 else None
    if store is not None:
        check = FirstBatch(_Left(store, index=index, size=size, compares=current_world().rank == 0))
        check.handle = model.register_forward_pre_hook(check, with_kwargs=True)


def watch_stream(world_size: int) -> StreamWatch | None:
    """Return a watch for a loader over a stream that ranks read in turn; ``None`` on a single rank.

    Collective: none, but every rank boosts equally many loaders.
    """
    store = _part_of_store("streams") if world_size > 1 else None
    if store is None:
        return None
    rank, size = current_world().rank, current_world().world_size
    return StreamWatch(_Left(store, index=rank, size=size, compares=rank == 0), size)


def watch_passes(world_size: int) -> PassWatch | None:
    """Return a watch for a loader that is boosted now; ``None`` on a single rank.

    Collective: none, but every rank boosts equally many loaders.
    """
    store = _part_of_store("passes") if world_size > 1 else None
    world = current_world()
    return None if store is None else PassWatch(store, world_size=world.world_size, cleans=world.rank == 0)


def _part_of_store(name: str) -> Store | None:
    """Return a part of the ranks' store for one more watch, the same on every rank that calls this equally often."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

    world = current_world()
    if world.store is not None:
        with contextlib.suppress(RuntimeError):  # the store's errors: what follows will meet them, too
            number = world.store.add(f"{name}/watches/{world.rank}", 1)
            return PrefixStore(f"{name}/{number}", world.store)
    return None


def _is_turn(number: int) -> bool:
    """Return whether to look at a batch of this number: ever more rarely."""
    return number & (number - 1) == 0


def show_first_batch(batches: Iterator[Any], model: nn.Module) -> Iterator[Any]:
    """Return an iterator over the same batches, which looks at them as forwards of the model would.

    Args:
        batches: Yields batches to train on, of which the model's forward gets parts only, or none on this rank.
        model: The boosted model.
    """
    for hook in model._forward_pre_hooks.values():  # noqa: SLF001 - no public name
        if isinstance(hook, FirstBatch):
            return _shown(batches, hook, model)
    return batches


def _shown(batches: Iterator[Any], hook: FirstBatch, model: nn.Module) -> Iterator[Any]:
    for batch in batches:
        hook(model, (batch,), {})
        yield batch


class _Left:
    """What ranks leave in the store at their first batch; one compares it at a later batch, when all is there.

    Args:
        store: What ranks share.
        index: Index of this rank.
        size: Number of ranks.
        compares: Whether this rank compares.

    Attributes:
        is_over: Whether this rank has nothing more to do.
    """

    def __init__(self, store: Store, *, index: int, size: int, compares: bool) -> None:
        self._store, self._index, self._compares = store, index, compares
        self._keys = [str(each) for each in range(size)]
        self.is_over = False

    def look(self, number: int, own: Callable[[], str]) -> dict[bytes, list[int]]:
        """Leave what this rank has at batch 1; return once who has left what, where this rank compares."""
        if self.is_over or not _is_turn(number):
            return {}
        self.is_over = True
        found: dict[bytes, list[int]] = {}
        with contextlib.suppress(RuntimeError):  # the store's errors: nothing depends on this
            if number == 1:
                self._store.set(str(self._index), own())
                self.is_over = not self._compares
            elif self._store.check(self._keys):
                for index, key in enumerate(self._keys):
                    found.setdefault(self._store.get(key), []).append(index)
                found.pop(b"", None)
            else:
                self.is_over = number >= _MOST_BATCHES
        return found


class FirstBatch:
    """A forward pre-hook that compares the first batch of a training with those of other ranks, and removes itself.

    Each rank leaves a digest of its batch at its first training forward. Rank 0 compares them in a later one, when they
    are there: a step needs all ranks. What equal batches mean is for the user to judge, so this is said once and raises
    nothing. Copies and pickles of a model do nothing with it.

    Args:
        left: What ranks share; without it, nothing is done.
    """

    def __init__(self, left: _Left | None = None) -> None:
        self._left = left
        self._num_forwards = 0
        self.handle: RemovableHandle | None = None

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._left is None or not model.training or not torch.is_grad_enabled():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a copy to the host would end the capture
        self._num_forwards += 1
        for ranks in self._left.look(self._num_forwards, lambda: digest_of((args, kwargs))).values():
            if len(ranks) > 1:
                log.warning(
                    "Data parallel %s got the same first batch: they compute the same gradients, where each should see "
                    "samples of its own. Pass the data loader to `boost`, or make it by `booster.prepare_dataloader`; "
                    "where batches are drawn, seed each rank by its rank.",
                    name_ranks(ranks),
                    extra=ANY_RANK,
                )
        if self._left.is_over:
            self._left = None
            if self.handle is not None:
                self.handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return FirstBatch, ()


class StreamWatch:
    """Says once that ranks begin with different items of a stream of which each takes its turn's items only.

    Args:
        left: What ranks share.
        world_size: Number of ranks.
    """

    def __init__(self, left: _Left, world_size: int) -> None:
        self._left, self._size = left, world_size

    def at_batch(self, number: int, first: str | None) -> None:
        """Leave the digest of the first item at a pass's first batch; rank 0 compares at a later one."""
        if len(self._left.look(number, lambda: first or "")) > 1:
            log.warning(
                "The ranks' streams begin with different samples, and each rank takes one of every %d of its own. If "
                "the data set splits itself between ranks, the others are lost: let it yield all samples on every "
                "rank, in the same order. Where it only augments them at random, all is well.",
                self._size,
                extra=ANY_RANK,
            )


def digest_of(batch: Any, *, takes_plain: bool = False) -> str:
    """Return a digest of a batch's tensors, by some of their elements; empty where it has none.

    Args:
        batch: Tensors in any nest of dicts, lists and tuples; what is no tensor is not looked at.
        takes_plain: Look at numbers and text, too.
    """
    seen: list[Any] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_meta and leaf.numel():
            step = -(-leaf.numel() // _MOST_ELEMENTS)
            seen.append((tuple(leaf.shape), leaf.detach().reshape(-1)[::step]))
        elif takes_plain and isinstance(leaf, (int, float, str, bytes)):
            seen.append(leaf)
    return digest(seen).hex() if seen else ""


class PassWatch:
    """Compares the epochs that ranks' passes over a loader follow: some samples would be seen twice, others never.

    A batch that is taken on one rank only, to look at it, counts as an epoch that was left early there. Ranks count
    themselves when a pass gets to its second batch, and look a few batches later: where they train in step, all have
    counted by then, and all raise at the same batch.

    Args:
        store: What ranks share.
        world_size: Number of ranks.
        cleans: Whether this rank removes what is no longer needed.
    """

    def __init__(self, store: Store, *, world_size: int, cleans: bool) -> None:
        self._store = store
        self._world_size = world_size
        self._cleans = cleans
        self._num_passes = 0
        self._is_settled = True
        self._keys: list[tuple[str, str]] = []

    def at_batch(self, number: int, epoch: int) -> None:
        """Count a batch of a pass, the first being number 1.

        Raises:
            ConfigError: If all ranks are in a pass, and some follow another epoch.
        """
        if number < _COUNTED_AT or not _is_turn(number):
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
        self._keys.append((f"{self._num_passes}/all", f"{self._num_passes}/epoch{epoch}"))
        for key in reversed(self._keys[-1]):  # whoever sees that all have counted sees in which epoch, too
            self._store.add(key, 1)
        self._is_settled = False
        if len(self._keys) > 2:  # all ranks have looked at the pass before the last
            for key in self._keys.pop(0):
                if self._cleans:
                    self._store.delete_key(key)
