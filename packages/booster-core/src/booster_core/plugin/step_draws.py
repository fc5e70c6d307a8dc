"""Random numbers that an optimizer draws in its step: noise of Langevin dynamics, stochastic rounding and the like.

Ranks that see different samples draw different numbers. Those that step on the same values must not: they would go on
with different models. They draw what the first of them does, as long as the step lasts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from booster_core.plugin.interface import BoostContext

_States = tuple["Tensor", "Tensor | None"]


class StepDraws:
    """Lets ranks draw alike in the steps of one optimizer, if its first step draws anything."""

    def __init__(self) -> None:
        self._draws: bool | None = None

    @contextlib.contextmanager
    def alike(self, group: ProcessGroup, context: BoostContext) -> Iterator[None]:
        """Let the ranks of a group draw alike in a ``with`` block; afterwards all but the first go on with their own.

        Args:
            group: The ranks that step on the same values.
            context: Of the ``boost``.

        Raises:
            ConfigError: If the optimizer draws numbers in a later step that drew none in its first.

        Collective: the group, unless the first step has drawn nothing.
        """
        import torch.distributed as dist

        device = context.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield  # what a graph draws is the graph's
            return
        own = _states(device)
        if self._draws is False:
            yield
            if not _are_same(own, _states(device)):
                msg = (
                    "The optimizer has drawn random numbers in a step, and drew none in its first: ranks that hold the "
                    "same parameters have drawn different ones. Let its first step draw, too, or use a generator of "
                    "its own that is seeded alike on all ranks."
                )
                raise ConfigError(msg)
            return
        first = dist.get_process_group_ranks(group)[0]
        _restore(context.coordinator.broadcast_object(own, first, process_group=group, meets=False), device)
        begin = _states(device)
        try:
            yield
            if self._draws is None:  # not after a step that has raised
                self._draws = not _are_same(begin, _states(device))
        finally:
            if dist.get_rank() != first:
                _restore(own, device)


def _states(device: torch.device) -> _States:
    host = torch.default_generator.get_state()
    return host, None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _restore(states: _States, device: torch.device) -> None:
    host, of_device = states
    torch.default_generator.set_state(host)
    if of_device is not None:
        torch.get_device_module(device).set_rng_state(of_device, device)


def _are_same(one: _States, other: _States) -> bool:
    return torch.equal(one[0], other[0]) and (one[1] is None or torch.equal(one[1], other[1]))  # type: ignore[arg-type]
