"""`Stragglers`: a meter that compares how long ranks compute, and names those that hold up the others.

Ranks wait for each other in collectives, so that the steps of all take as long as those of the slowest. What tells them
apart is the time of what they do alone: the forward of the model's blocks, after their parameters are gathered.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.log import log
from booster_core.ranks import DistCoordinator, this_host
from booster_runtime.activations import select_modules
from booster_tools.tracking.interface import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from booster_core import Booster


class Stragglers(Meter):
    """Measures one step of many on every rank, adds the comparison to it, and warns of ranks that are slow.

    Values: ``forward_seconds_median`` over the ranks, ``forward_seconds_max``, and ``slowest_rank``. Layers that sum
    over tensor parallel ranks count as slow together.

    Args:
        booster: Of the run.
        model: The boosted model.
        by: The modules whose forward is measured, as for `enable_activation_checkpointing`; by default the model's
            repeated blocks.
        every: Measure each ``every``-th step.
        threshold: A rank is slow from this many times the median on.

    Raises:
        ConfigError: If no module is meant, or a number is out of range.

    Collective: none; in each measured step ranks gather a number each.
    """

    def __init__(
        self, booster: Booster, model: nn.Module, by: Any = None, *, every: int = 100, threshold: float = 1.3
    ) -> None:
        if every < 1 or threshold <= 1:
            msg = f"`every={every}` must be 1 or more, and `threshold={threshold}` more than 1."
            raise ConfigError(msg)
        self._modules = select_modules(model, by, 1, "Stragglers")
        self._device = booster.device
        self._every, self._threshold = every, threshold
        self._num_steps = 0
        self._handles: list[RemovableHandle] = []
        self._started: list[Any] = []
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Begin to count steps."""
        self._num_steps = 0
        self._listen()

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._started, self._spans = [], [], []

    def measure(self, seconds: float, metrics: Mapping[str, Any]) -> Mapping[str, float | Tensor]:
        """Return the comparison of ranks, in a step that was measured.

        Collective: every rank of the world, in those steps.
        """
        del seconds, metrics
        self._num_steps += 1
        values: dict[str, float | Tensor] = {}
        if self._handles:
            values = self._compare(sum(self._seconds(*span) for span in self._spans))
            self.stop()
        self._listen()
        return values

    def _listen(self) -> None:
        """Put hooks on the modules if the next step is to be measured."""
        if (self._num_steps + 1) % self._every:
            return
        for module in self._modules:
            # After the strategy's hook before forward, and before its hook after it.
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, prepend=True))

    def _enter(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._started.append(self._now())

    def _leave(self, *_: Any) -> None:
        if self._started and not torch.compiler.is_compiling():
            self._spans.append((self._started.pop(), self._now()))

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if isinstance(start, float):
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _compare(self, own: float) -> dict[str, float | Tensor]:
        coordinator = DistCoordinator()
        told = coordinator.all_gather_object((own, this_host().name), name="Stragglers")
        median = statistics.median(seconds for seconds, _ in told)
        if not median:  # nothing was called, or modules that are compiled with their hooks
            return {}
        slow = [(rank, *each) for rank, each in enumerate(told) if each[0] > self._threshold * median]
        if slow:
            named = ", ".join(f"rank {rank} on {host} ({each / median:.2f})" for rank, each, host in slow)
            log.warning(
                "Slow in forward, in multiples of the median over ranks: %s. All ranks wait for them; look at their "
                "clocks, temperature, other processes and lengths of batches.",
                named,
            )
        slowest = max(range(len(told)), key=lambda rank: told[rank][0])
        return {
            "forward_seconds_median": median,
            "forward_seconds_max": told[slowest][0],
            "slowest_rank": float(slowest),
        }
