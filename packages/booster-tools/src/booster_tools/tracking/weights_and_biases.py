"""`WeightsAndBiases`: a tracker that logs to a run of Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_tools.tracking.interface import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping


class WeightsAndBiases(Tracker):
    """Logs each step's values to a run of Weights & Biases.

    Args:
        settings: Arguments of ``wandb.init``: ``project="llama"``; ``mode="offline"`` writes a folder that
            ``wandb sync`` uploads later; ``id=`` and ``resume="allow"`` go on with an earlier run.

    Raises:
        ConfigError: When it starts, if the package ``wandb`` is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: Any = None

    def start(self, step: int) -> None:
        """Open the run. The service keeps what it has for later steps, and takes no other values for them."""
        del step
        try:
            import wandb
        except ImportError as cause:
            msg = f"`WeightsAndBiases` needs the package `wandb` ({cause}). Run `pip install wandb`."
            raise ConfigError(msg) from cause
        self._run = wandb.init(**self._settings)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the run's config."""
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
