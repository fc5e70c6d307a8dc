"""`JsonLines`: a tracker that writes a file with a JSON object for each step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from booster_core.errors import ConfigError
from booster_tools.tracking.interface import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines(Tracker):
    """Appends ``{"step": 1, "loss": 2.5, ...}`` to a file for each step.

    A line is complete when `log` returns, so that a run that is killed leaves whole lines. Values that are not finite,
    which JSON has no numbers for, are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

    Args:
        path: The file. Its folder is made. A run that starts at an earlier step than the file's last moves the lines of
            later steps to a file with ``.dropped`` at its end. ``booster plot`` draws the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def start(self, step: int) -> None:
        """Open the file; move lines of later steps away, and drop a last line that was cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            rows = read_json_lines(self.path)
            if later := [_line(row) for row in rows if row["step"] > step]:
                with self.path.with_name(f"{self.path.name}.dropped").open("a", encoding="utf-8") as dropped:
                    dropped.writelines(later)
            partial = self.path.with_name(f"{self.path.name}.partial")
            partial.write_text("".join(_line(row) for row in rows if row["step"] <= step), encoding="utf-8")
            partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        if self._file is None:
            msg = f"The tracker of {self.path} has not been started. Pass it to `track`, which does."
            raise ConfigError(msg)
        self._file.write(_line({"step": step, **values}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_json_lines(path: str | Path) -> list[dict[str, float]]:
    """Return the values of each step of a file that `JsonLines` wrote, in the order of the lines.

    A last line that a killed run left incomplete is left out.

    Raises:
        ConfigError: If the file is no such file.
    """
    rows = []
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            rows.append({str(name): float(_NOT_FINITE.get(value, value)) for name, value in row.items()})
            rows[-1]["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError, AttributeError) as cause:
            msg = f"Line {number} of {path} holds no values of a step: {line.strip()[:80]!r}."
            raise ConfigError(msg) from cause
    return rows


def _line(row: Mapping[str, float]) -> str:
    names = {repr(value): name for name, value in _NOT_FINITE.items()}
    return json.dumps({name: names.get(repr(value), value) for name, value in row.items()}) + "\n"
