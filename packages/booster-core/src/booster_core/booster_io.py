"""The saving half of `Booster`: finds the plugin's view of a model's state and hands it to `CheckpointIO`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from booster_core.plugin import BoostContext, Plugin
    from booster_core.state.adapter import StateAdapter


class BoosterIO:
    """Saves and loads what `Booster.boost` returned."""

    plugin: Plugin

    @property
    def context(self) -> BoostContext:
        """Device, ranks, precision and hooks of this run."""
        raise NotImplementedError

    def state_adapter(self, model: nn.Module, optimizer: Optimizer | None = None) -> StateAdapter:
        """Return the plugin's view of a boosted model's (and its optimizer's) state, as shards.

        Collective: none.
        """
        return self.plugin.state_adapter(model, optimizer, self.context)
