"""Gathers of updated parameters that go on after ``step``, each waited for before the first use of what it brings.

Until then the bucket's parameters are absent (`booster_runtime.memory.absent`), so that whatever reads or writes one
waits, in forward and outside of it, from whichever thread. The end of ``forward``, ``backward``, the next ``step`` and
whoever looks into buckets wait for the rest.

What can't wait is a read of memory by a view, NumPy's say, that was made before the step.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from booster_core.ranks import NamedCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from booster_runtime.collectives import Pending
    from booster_zero.engine.bucket import Bucket
    from booster_zero.engine.layout import Layout


class Wholes(Protocol):
    """Brings whole values to where they are used: what a sharded optimizer tells it.

    Collective: its methods are called on every rank of the world.
    """

    def begin_backward(self) -> None:
        """Make ready for a backward."""

    def end_backward(self) -> None:
        """End a backward, also one that raised."""

    def begin_step(self, buckets: Sequence[Bucket], names: Mapping[int, str]) -> None:
        """Make ready for an update of the buckets' parameters."""

    def end_step(self, published: Mapping[Bucket, Pending]) -> None:
        """Let the next use of buckets see what the optimizer updated; see `Bucket.publish`."""

    def in_order_of_forward(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return all buckets in the order in which forward is expected to use them."""

    def order_to_lay_out(self, order: list[int], layout: Layout) -> list[int] | None:
        """Return the parameters in the order in which this rank would have them; ``None`` where that is no matter.

        Args:
            order: The parameters, in the order in which this rank's backward produced gradients.
            layout: Where they are now.
        """

    def wait(self) -> None:
        """Return once updated parameters are here that a step has left on their way.

        Collective: none; the gathers were entered when they were started.
        """

    def release_all(self) -> None:
        """Forget whole values, but for those that are always here."""

    def after_laying_out(self) -> None:
        """Take note of new buckets, whose values are in place."""

    def meet(self) -> None:
        """Announce that this rank's gradients are reduced, where ranks compare what they do."""

    def check_same_order(self) -> None:
        """Check that all ranks have gathered the same buckets in the same order since the last call."""


class Gathers:
    """The gathers that are underway, of buckets whose whole values are always here.

    They are waited for, too, when the object goes or the process ends: gloo's threads write into the buckets until
    then.

    Args:
        overlaps: Let a step return while updated parameters are still being gathered.
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._pending: dict[Bucket, Pending] = {}
        weakref.finalize(self, _wait_quietly, self._pending)

    # ---- what the optimizer tells

    def begin_backward(self) -> None:
        """Wait for everything."""
        self.wait()

    def end_backward(self) -> None:
        """Do nothing: the whole values stay."""

    def begin_step(self, buckets: Sequence[Bucket], names: Mapping[int, str]) -> None:
        """Wait for everything, and take in what somebody else has written into parameters.

        Raises:
            ConfigError: If a parameter was given other memory since it was laid out.
        """
        self.wait()
        for bucket in buckets:
            bucket.notice_changes(names)

    def end_step(self, published: Mapping[Bucket, Pending]) -> None:
        """Wait for updated parameters; where gathers overlap, on first use alone."""
        if not self._overlaps:
            for pending in published.values():
                pending.wait()
        for bucket in published:
            bucket.mark_changed()
        if self._overlaps:
            for bucket, pending in published.items():
                self._pending[bucket] = pending
                bucket.await_gather(pending)

    def in_order_of_forward(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return the reverse of the buckets, which are laid out in the order of backward."""
        return buckets[::-1]

    def order_to_lay_out(self, order: list[int], layout: Layout) -> list[int] | None:
        """Return the order of backward, if any rank waits for another's buckets."""
        return order if layout.is_shared else None

    def release_all(self) -> None:
        """Do nothing: the whole values stay."""

    def after_laying_out(self) -> None:
        """Do nothing: the whole values are in the new buckets."""

    def meet(self) -> None:
        """Do nothing: no use of a parameter concerns other ranks."""

    def check_same_order(self) -> None:
        """Do nothing, for the same reason."""

    # ---- waiting

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Return once everything is there.

        Collective: none; the gathers were entered when they were started.
        """
        while self._pending:
            self._end(next(iter(self._pending)))

    @contextlib.contextmanager
    def during_forward(self, model: nn.Module) -> Iterator[None]:
        """Run the model's forward inside: its uses of parameters wait, and its end waits for the rest."""
        if not self._pending:
            yield
            return
        if any(map(_is_compiled, model.modules())):  # its graph would break at each use
            self.wait()
        try:
            yield
        finally:
            self.wait()

    @property
    def is_underway(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._pending)

    def _end(self, bucket: Bucket) -> None:
        with NamedCall("gather of parameters"):
            bucket.finish_gather()
        del self._pending[bucket]

    # ---- what buckets tell, see `User`

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def on_use(self, bucket: Bucket, index: int, what: str) -> None:
        """Wait for a bucket one of whose parameters is used."""
        del index, what
        self._end(bucket)

    def on_show(self, bucket: Bucket) -> None:
        """Do nothing: what is written into a parameter stays."""

    def on_hide(self, bucket: Bucket) -> None:
        """Do nothing, for the same reason."""


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def _wait_quietly(pending: dict[Bucket, Pending]) -> None:
    with contextlib.suppress(RuntimeError):
        for each in pending.values():
            each.wait()
    pending.clear()
