"""`WeightsAndBiases`, `Trackio` and `MLflow`: trackers that log to a run of a service."""

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
    _distribution: ClassVar[str | None] = None
    _begin: ClassVar[str] = "init"

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
            found = self._distribution or self._package
            msg = f"`{name}` needs the package `{self._package}` ({cause}). Run `pip install {found}`."
            raise ConfigError(msg) from cause
        self._run = getattr(package, self._begin)(**self._settings)

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


class MLflow(_RunTracker):
    """Logs each step's values to a run of MLflow; the server is that of ``MLFLOW_TRACKING_URI``.

    Args:
        settings: Arguments of ``mlflow.start_run``: ``run_name="first"``; ``run_id=`` goes on with an earlier run.

    Raises:
        ConfigError: When it starts, if the package ``mlflow`` is not installed.
    """

    _package = "mlflow"
    _distribution = "mlflow-skinny"
    _begin = "start_run"

    def configure(self, config: Mapping[str, Any]) -> None:
        """Log the settings as the run's parameters."""
        import_module("mlflow").log_params(dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        import_module("mlflow").log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            import_module("mlflow").end_run()
