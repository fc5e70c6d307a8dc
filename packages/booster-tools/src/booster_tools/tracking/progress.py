"""`ProgressBar`: a tracker that shows the last step's values in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_tools.tracking.interface import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ProgressBar(Tracker):
    """Shows a bar of tqdm with the steps taken and some values of the last one.

    Args:
        total: Number of steps of the whole run; ``None`` shows steps and rate only.
        names: Values to show.

    Raises:
        ConfigError: When it starts, if the package ``tqdm`` is not installed.
    """

    def __init__(self, total: int | None = None, names: Sequence[str] = ("loss", "tokens_per_second")) -> None:
        self._total = total
        self._names = names
        self._bar: Any = None

    def start(self, step: int) -> None:
        """Show the bar."""
        try:
            from tqdm.auto import tqdm
        except ImportError as cause:
            msg = f"`ProgressBar` needs the package `tqdm` ({cause}). Run `pip install tqdm`."
            raise ConfigError(msg) from cause
        self._bar = tqdm(total=self._total, initial=step, unit="step", dynamic_ncols=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Move the bar."""
        shown = {name: f"{values[name]:.4g}" for name in self._names if name in values}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
