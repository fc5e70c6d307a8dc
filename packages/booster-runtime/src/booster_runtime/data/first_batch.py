"""Noticing that data parallel ranks train on the same batch, as they do where they draw or load it under equal seeds.

At the first training step each rank leaves a digest of its batch in the ranks' store; no rank waits for another. Rank 0
compares them in a later step, when they are there: a step needs all ranks. What equal batches mean is for the user to
judge, so this is said once and raises nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_core.log import ANY_RANK, log
from booster_core.ranks import current_world, digest, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public
    from torch.utils.hooks import RemovableHandle


_MOST_ELEMENTS = 4096
"""How many elements of each tensor are looked at, spread over it."""
_MOST_FORWARDS = 1024
"""After so many forwards rank 0 stops looking for what the others left."""


def watch_first_batch(model: nn.Module, *, index: int, size: int) -> None:
    """Compare the first batches that data parallel ranks train a boosted model on, and say if some are equal.

    Args:
        model: The boosted model; its next training forwards are looked at.
        index: Index of this rank among the ranks that see different samples.
        size: Number of these ranks.

    Collective: none, but every rank boosts equally many models.
    """
    world = current_world()
    if size < 2 or world.store is None:
        return
    with contextlib.suppress(RuntimeError):  # the store's errors: what follows will meet them, too
        number = world.store.add(f"first_batch/boosts/{world.rank}", 1)
        check = FirstBatch(world.store, f"first_batch/{number}", index=index, size=size, compares=world.rank == 0)
        check.handle = model.register_forward_pre_hook(check, with_kwargs=True)


def show_first_batch(batches: Iterator[Any], model: nn.Module) -> Iterator[Any]:
    """Return an iterator over the same batches, which looks at them as forwards of the model would.

    Args:
        batches: Yields batches to train on, of which the model's forward gets parts only, or none on this rank.
        model: The boosted model.

    Collective: none.
    """
    for hook in model._forward_pre_hooks.values():  # noqa: SLF001 - no public name
        if isinstance(hook, FirstBatch):
            return _Shown(batches, hook, model)
    return batches


class _Shown:
    """An iterator that shows each batch to a hook."""

    def __init__(self, batches: Iterator[Any], hook: FirstBatch, model: nn.Module) -> None:
        self._batches, self._hook, self._model = batches, hook, model

    def __iter__(self) -> _Shown:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._hook(self._model, (batch,), {})
        return batch


class FirstBatch:
    """A forward pre-hook that compares the first batch of a training with those of other ranks, and removes itself.

    Args:
        store: What ranks share; without one, nothing is done.
        prefix: Where in the store; the same on every rank.
        index: Index of this rank among the ranks that see different samples.
        size: Number of these ranks.
        compares: Whether this rank compares.

    Copies and pickles of a model do nothing with it.
    """

    def __init__(
        self, store: Store | None = None, prefix: str = "", *, index: int = 0, size: int = 1, compares: bool = False
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._index = index
        self._size = size
        self._compares = compares
        self._num_forwards = 0
        self.handle: RemovableHandle | None = None

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._store is None or not model.training or not torch.is_grad_enabled():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a copy to the host would end the capture
        self._num_forwards += 1
        is_over = True
        with contextlib.suppress(RuntimeError):  # the store's errors: nothing depends on this
            if self._num_forwards == 1:
                self._store.set(f"{self._prefix}/{self._index}", digest_of((args, kwargs)))
                is_over = not self._compares
            elif self._num_forwards & (self._num_forwards - 1) == 0:  # ever more seldom
                is_over = self._compare(self._store) or self._num_forwards >= _MOST_FORWARDS
            else:
                is_over = False
        if is_over:
            self._store = None
            if self.handle is not None:
                self.handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return FirstBatch, ()

    def _compare(self, store: Store) -> bool:
        """Say which ranks have equal batches; return False where some have not had one yet."""
        keys = [f"{self._prefix}/{index}" for index in range(self._size)]
        if not store.check(keys):
            return False
        same: dict[bytes, list[int]] = {}
        for index, key in enumerate(keys):
            same.setdefault(store.get(key), []).append(index)
        same.pop(b"", None)
        for ranks in same.values():
            if len(ranks) > 1:
                log.warning(
                    "Data parallel %s got the same first batch: they compute the same gradients, where each should see "
                    "samples of its own. Pass the data loader to `boost`, or make it by `booster.prepare_dataloader`; "
                    "where batches are drawn, seed each rank by its rank.",
                    name_ranks(ranks),
                    extra=ANY_RANK,
                )
        return True


def digest_of(batch: Any) -> str:
    """Return a digest of a batch's tensors, by some of their elements; empty where it has none.

    Args:
        batch: Tensors in any nest of dicts, lists and tuples; what is no tensor is not looked at.

    Collective: none.
    """
    seen = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_meta and leaf.numel():
            step = -(-leaf.numel() // _MOST_ELEMENTS)
            seen.append((tuple(leaf.shape), leaf.detach().reshape(-1)[::step]))
    return digest(seen).hex() if seen else ""
