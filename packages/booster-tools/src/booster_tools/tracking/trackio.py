"""`Trackio`: a tracker that logs to a run of Trackio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_tools.tracking.interface import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping


class Trackio(Tracker):
    """Logs each step's values to a run of Trackio, whose dashboard is local or a Space of the Hugging Face Hub.

    Args:
        settings: Arguments of ``trackio.init``: ``project="llama"``; ``space_id="user/name"``; ``name=`` and
            ``resume="allow"`` go on with an earlier run.

    Raises:
        ConfigError: When it starts, if the package ``trackio`` is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._run: Any = None

    def start(self, step: int) -> None:
        """Open the run. It keeps what it has for later steps besides what is logged for them now."""
        del step
        try:
            import trackio
        except ImportError as cause:
            msg = f"`Trackio` needs the package `trackio` ({cause}). Run `pip install trackio`."
            raise ConfigError(msg) from cause
        self._run = trackio.init(**self._settings)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Add the settings to the run's config."""
        self._run.config.update(config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
