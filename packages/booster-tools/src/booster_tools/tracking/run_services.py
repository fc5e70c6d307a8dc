"""`WeightsAndBiases` and `Trackio`: trackers that log to a run, by the same functions of two packages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from booster_core.errors import ConfigError
from booster_tools.tracking.interface import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping


class _RunTracker(Tracker):
    """Logs each step's values to the run that a package's ``init`` returns."""

    _package: ClassVar[str]

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: Any = None

    def start(self, step: int) -> None:
        """Open the run. It keeps what it has for later steps."""
        del step
        try:
            package = import_module(self._package)
        except ImportError as cause:
            name = type(self).__name__
            msg = f"`{name}` needs the package `{self._package}` ({cause}). Run `pip install {self._package}`."
            raise ConfigError(msg) from cause
        self._run = package.init(**self._settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


class WeightsAndBiases(_RunTracker):
    """Logs each step's values to a run of Weights & Biases, which takes no other values for steps that it has.

    Args:
        settings: Arguments of ``wandb.init``: ``project="llama"``; ``mode="offline"`` writes a folder that
            ``wandb sync`` uploads later; ``id=`` and ``resume="allow"`` go on with an earlier run.

    Raises:
        ConfigError: When it starts, if the package ``wandb`` is not installed.
    """

    _package = "wandb"

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the run's config."""
        self._run.config.update(dict(config), allow_val_change=True)


class Trackio(_RunTracker):
    """Logs each step's values to a run of Trackio, whose dashboard is local or a Space of the Hugging Face Hub.

    Args:
        settings: Arguments of ``trackio.init``: ``project="llama"``; ``space_id="user/name"``; ``name=`` and
            ``resume="allow"`` go on with an earlier run.

    Raises:
        ConfigError: When it starts, if the package ``trackio`` is not installed.
    """

    _package = "trackio"

    def configure(self, config: Mapping[str, Any]) -> None:
        """Add the settings to the run's config."""
        self._run.config.update(config)
