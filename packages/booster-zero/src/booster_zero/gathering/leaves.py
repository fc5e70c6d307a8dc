"""Modules whose parameters are gathered as one, because each batch chooses which of them it uses.

Ranks gather buckets together, so that all have to use the same ones in the same order. Experts are chosen by the data,
differently on every rank. A *leaf* gathers the buckets of all its parameters when its forward begins and when its
backward begins, and keeps them until that has ended; what happens inside of it makes no difference to other ranks. (The
idea is that of DeepSpeed's ``set_z3_leaf_modules``.)
"""

from __future__ import annotations

import weakref
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.gatherer import Gatherer


class LeafUse:
    """Keeps the buckets of one leaf gathered during its backward.

    Args:
        gatherer: Gathers the buckets.
        indices: The parameters of the leaf, by number, in the order in which they are gathered.
        on_passed: Called with ``indices`` when backward has passed all uses of the leaf.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        indices: Sequence[int],
        on_passed: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._gatherer = gatherer
        self.indices = tuple(indices)
        self._on_passed = on_passed
        self._expected: weakref.WeakSet[_Use] = weakref.WeakSet()  # a graph that is dropped takes its use along

    def buckets(self) -> list[Bucket]:
        """Return the leaf's buckets as they are laid out now."""
        return self._gatherer.layout.buckets_of(self.indices)

    def expect_backward(self, inputs: Any, outputs: Any) -> None:
        """Gather the buckets once backward has reached an output, until it has left by all inputs.

        Where no input requires a gradient, they stay until the end of backward.

        Args:
            inputs: What forward was called with.
            outputs: What it returned.

        Collective: none; backward is, in the shard group.
        """
        before, after = _differentiated(inputs), _differentiated(outputs)
        if not after:
            return
        holder = _Use()  # what goes out of one may go into the next
        self._expected.add(holder)
        # Not all outputs: one that is used inside, too, has its gradient after others.
        register_multi_grad_hook(after, lambda _: self._gatherer.hold(holder, self.buckets()), mode="any")
        if before:
            register_multi_grad_hook(before, lambda _: self._pass(holder))

    def _pass(self, holder: _Use) -> None:
        self._gatherer.let_go(holder)
        self._expected.discard(holder)
        if not self._expected and self._on_passed is not None:
            self._on_passed(self.indices)


class _Use:
    """One use of a leaf in a forward, which holds its buckets in backward."""


def _differentiated(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers that require gradients."""
    found: list[torch.Tensor] = []
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                found.append(each)
        elif is_dataclass(each) and not isinstance(each, type):
            found += _differentiated([getattr(each, field.name) for field in fields(each)])
    return found
