"""`RouterStatistics`: how evenly the routers of a mixture of experts send tokens to experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.plugin import ModelWrapper
from booster_runtime.collectives import all_reduce
from booster_tools.tracking.interface import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from booster_core import Booster

_OUTPUTS = 3
"""Logits of all experts, weights of the chosen ones, and their numbers."""


class RouterStatistics(Meter):
    """Tells of each router how it spread the tokens of a step over experts; pass it to `track` as one of ``meters``.

    Values of a step, of all ranks' tokens together, by the router's name in the model such as
    ``router/model.layers.0.mlp.gate/``: ``max_load`` and ``min_load``, the tokens of the expert with most and with
    fewest, divided by the mean over experts, so that 1 is even; ``dropped``, the share of choices that no expert takes,
    as routers with a capacity make them; and ``entropy``, the mean over tokens of the entropy of the softmax of their
    logits, in nats. Of training forwards only; recomputed forwards don't change these values.

    Routers are the modules whose class name has ``Router``, as in transformers. They return the logits
    ``(tokens, experts)``, the weights ``(tokens, top_k)`` and the numbers ``(tokens, top_k)`` of the chosen experts; a
    number that no expert has chooses none.

    Args:
        booster: Of the run.
        model: The boosted model.
        every: Measure each so many steps; others cost nothing.
        per_expert: Add the ``load`` of each expert, by its number.

    Attributes:
        loads: Choices of each expert, divided by their mean, in the step measured last, by router; ``(experts,)``.

    Raises:
        TypeError: If the model is not a boosted one.
        ConfigError: If it has no router, or ``every`` is not positive; in forward, if a router returns something else.

    Collective: none; the steps inside of `track` that are measured are, of every rank of the world.
    """

    def __init__(self, booster: Booster, model: nn.Module, *, every: int = 1, per_expert: bool = False) -> None:
        if not isinstance(model, ModelWrapper):
            msg = f"`RouterStatistics` needs the model returned by `Booster.boost`; got `{type(model).__name__}`."
            raise TypeError(msg)
        if every < 1:
            msg = f"`every={every}` is no number of steps; use 1 or more."
            raise ConfigError(msg)
        modules = model.unwrap().named_modules()
        self._routers = {name: module for name, module in modules if "Router" in type(module).__name__}
        self._coordinator, self._device = booster.context.coordinator, booster.device
        if not self._routers:
            msg = (
                f"{type(model.unwrap()).__name__} has no routers: no module's class is named as one, such as "
                "`MixtralTopKRouter`. Leave `RouterStatistics` out, or give the class of yours such a name."
            )
            raise ConfigError(msg)
        self._every, self._per_expert = every, per_expert
        self._num_steps = 0
        self._handles: list[RemovableHandle] = []
        # Of each router's choices: how many each expert has, and none; then the sum of entropies, and of tokens.
        self._sums: dict[str, Tensor] = {}
        self.loads: dict[str, Tensor] = {}

    def start(self) -> None:
        """Begin to look at what routers return."""
        self._sums.clear()
        self._handles = [
            router.register_forward_hook(partial(self._count, name)) for name, router in self._routers.items()
        ]

    def stop(self) -> None:
        """End it."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _count(self, name: str, router: nn.Module, given: tuple[Any, ...], outputs: Any) -> None:
        # A pipeline's stage runs the layers of others on tensors of another class, and shows hooks what came of them.
        is_elsewhere = not given or type(given[0]) is not torch.Tensor
        if is_elsewhere or not router.training or (self._num_steps + 1) % self._every:
            return
        if not _is_choice(outputs):
            msg = (
                f"The router '{name}' (`{type(router).__name__}`) does not return logits, weights and numbers of "
                "experts, of which `RouterStatistics` counts the numbers. Leave it out for this model."
            )
            raise ConfigError(msg)
        logits, _, chosen = outputs
        entropy = torch.special.entr(logits.float().softmax(-1)).sum().double()
        size = logits.shape[-1]
        counts = torch.bincount(chosen.flatten().clamp(max=size), minlength=size + 1).double()
        added = torch.cat([counts, entropy[None], torch.full_like(entropy[None], logits.shape[0])])
        self._sums[name] = self._sums[name] + added if name in self._sums else added

    def measure(self, seconds: float, metrics: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return the values of the step that ended, of all ranks; nothing between the steps that are measured.

        Collective: in steps that are measured, every rank of the world.
        """
        del seconds, metrics
        self._num_steps += 1
        if self._num_steps % self._every:
            return {}
        # Stages of a pipeline have routers each, and layers may be left out; what a rank lacks counts as nothing.
        own = {name: len(each) for name, each in self._sums.items()}
        sizes: dict[str, int] = {}
        for each in self._coordinator.all_gather_object(own, name="RouterStatistics"):
            sizes |= each
        if not sizes:
            return {}
        parts = [
            self._sums.get(name, torch.zeros(size, dtype=torch.float64, device=self._device))
            for name, size in sizes.items()
        ]
        self._sums.clear()
        summed = torch.cat(parts)
        if self._coordinator.world_size > 1:
            # Ranks that work on one batch together count it equally often, which leaves all values as they are.
            all_reduce(summed).wait()
        values: dict[str, Tensor] = {}
        for name, part in zip(sizes, torch.split(summed, list(sizes.values())), strict=True):
            counts, dropped, (entropy, tokens) = part[:-3], part[-3], part[-2:]
            load = self.loads[name] = counts / counts.mean().clamp(min=1e-9)
            found = {
                "max_load": load.max(),
                "min_load": load.min(),
                "dropped": dropped / (counts.sum() + dropped).clamp(min=1),
                "entropy": entropy / tokens.clamp(min=1),
            }
            if self._per_expert:
                found |= {f"load/{number}": each for number, each in enumerate(load)}
            values |= {f"router/{name}/{key}": value for key, value in found.items()}
        return values


def _is_choice(outputs: Any) -> bool:
    """Return whether a router returned logits, weights, and numbers of experts."""
    if not isinstance(outputs, tuple) or len(outputs) != _OUTPUTS:
        return False
    logits, weights, chosen = outputs
    is_whole = isinstance(chosen, torch.Tensor) and not chosen.is_floating_point()
    return is_whole and logits.dim() == chosen.dim() == 2 and weights.shape == chosen.shape
