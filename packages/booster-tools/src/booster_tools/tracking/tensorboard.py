"""`TensorBoard`: a tracker that writes event files for TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_tools.tracking.interface import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class TensorBoard(Tracker):
    """Writes each value as a scalar, by torch's ``SummaryWriter``: ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: The folder of the event files.

    Raises:
        ConfigError: When it starts, if the package ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        self._writer: Any = None

    def start(self, step: int) -> None:
        """Open an event file; TensorBoard hides what older files have for later steps."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as cause:
            msg = f"`TensorBoard` needs the package `tensorboard` ({cause}). Run `pip install tensorboard`."
            raise ConfigError(msg) from cause
        self._writer = SummaryWriter(self._folder, purge_step=step + 1)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the settings as a text."""
        self._writer.add_text("config", "\n".join(f"- {name}: {value}" for name, value in config.items()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is in memory and close the file."""
        if self._writer is not None:
            self._writer.close()
