"""A shard's gradient and values on their way to the host, where its optimizer's state is stepped, and back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from booster_zero.engine.home import Role

if TYPE_CHECKING:
    from torch import Tensor

    from booster_zero.engine.home import Home
    from booster_zero.engine.shard import Shard


class EarlyGradient:
    """A copy of a gradient on the host, started as soon as it has been reduced, while backward goes on.

    Args:
        gradient: On the device; in use.
        home: Whose stream of copies is used.
    """

    def __init__(self, gradient: Tensor, home: Home) -> None:
        copy_stream = home.copy_stream(gradient.device, up=False)
        with copy_stream.after_compute():
            self.copy = _sent(gradient, pins=home.pins)
            self.arrived = copy_stream.record()
        copy_stream.keep(gradient)
        self._gradient, self._version = gradient, gradient._version  # noqa: SLF001 - as autograd does

    def precede(self) -> None:
        """Let what is computed from now on, which may write to the gradient, come after the copy."""
        if self.arrived is not None:
            self.arrived.wait()

    def is_of(self, gradient: Tensor | None) -> bool:
        """Return whether this is a gradient as it is now: nobody has clipped it, say, or moved it elsewhere."""
        return gradient is self._gradient and gradient._version == self._version  # noqa: SLF001


class Descent:
    """Copies to the host, started when made; several may be underway while another shard is stepped.

    Args:
        shard: Its gradient and, where the optimizer updates them themselves, its values are copied, and stay in use
            until `end`. Values that are offloaded are used where they are.
        early: The copy of the gradient, if that has been started.

    Attributes:
        gradient: The copy; ``None`` where there is no gradient.
        values: The copy; ``None`` where the optimizer has masters of its own, or values are offloaded.
        own: Working values that are offloaded, which may be written to; ``None`` where they are on the device.
    """

    def __init__(self, shard: Shard, early: EarlyGradient | None) -> None:
        self._use = contextlib.ExitStack()
        self.own = shard.use_own_below(self._use)
        self._use.enter_context(shard.in_use(*self.roles, Role.GRAD, changes=False))
        copy_stream, pins = shard.home.copy_stream(shard.format.device, up=False), shard.home.pins
        self._early = early
        with copy_stream.after_compute():
            self.gradient = _sent(shard.gradient, pins=pins) if early is None and shard.has_gradient else None
            is_copied = self.own is None and not shard.format.has_copy
            self.values = _sent(shard.own, pins=pins) if is_copied else None
            # An event without a copy of its own would come after all early gradients, which share the stream.
            is_underway = self.gradient is not None or self.values is not None
            self._arrived = copy_stream.record() if is_underway else None
        if early is not None:
            self.gradient = early.copy

    @property
    def roles(self) -> tuple[Role, ...]:
        """What is on the device, of the values: none where they are offloaded."""
        return (Role.PARAM,) if self.own is None else ()

    def wait(self) -> None:
        """Return once the host can read the copies."""
        for arrived in (self._arrived, None if self._early is None else self._early.arrived):
            if arrived is not None:
                arrived.synchronize()

    def end(self) -> None:
        """Give up the shard's values and gradient; what was written to offloaded values is kept."""
        self.wait()  # nothing reads them any more
        self._use.close()


def lift(target: Tensor, source: Tensor, *, pins: bool) -> None:
    """Copy values of the host to a device, in the device's format, while the host goes on.

    Args:
        target: On the device.
        source: On the host; it may be changed at once if it is of another format, or else not page-locked.
        pins: Whether a copy in another format is page-locked.
    """
    if source.dtype != target.dtype:
        source = _beneath(target, pins=pins).copy_(source)
    target.copy_(source, non_blocking=True)


def _sent(tensor: Tensor | None, *, pins: bool) -> Tensor | None:
    return None if tensor is None else _beneath(tensor, pins=pins).copy_(tensor, non_blocking=True)


def _beneath(tensor: Tensor, *, pins: bool) -> Tensor:
    """Return memory of the host for a copy of a device's tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
