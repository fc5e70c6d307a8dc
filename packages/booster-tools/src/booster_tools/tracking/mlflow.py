"""`MLflow`: a tracker that logs to a run of MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_tools.tracking.interface import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping


class MLflow(Tracker):
    """Logs each step's values to a run of MLflow; the server is that of ``MLFLOW_TRACKING_URI``.

    Args:
        settings: Arguments of ``mlflow.start_run``: ``run_name="first"``; ``run_id=`` goes on with an earlier run.

    Raises:
        ConfigError: When it starts, if the package ``mlflow`` is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._mlflow: Any = None

    def start(self, step: int) -> None:
        """Open the run. The service keeps what it has for later steps besides what is logged for them now."""
        del step
        try:
            import mlflow
        except ImportError as cause:
            msg = f"`MLflow` needs the package `mlflow` ({cause}). Run `pip install mlflow-skinny`."
            raise ConfigError(msg) from cause
        mlflow.start_run(**self._settings)
        self._mlflow = mlflow

    def configure(self, config: Mapping[str, Any]) -> None:
        """Log the settings as the run's parameters."""
        self._mlflow.log_params(dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._mlflow is not None:
            self._mlflow.end_run()
