"""Runs of commands in this process, whose two outputs are apart."""

from __future__ import annotations

import inspect
from typing import Any

from click.testing import CliRunner


def command_runner() -> CliRunner:
    """Return a runner whose results have ``stdout`` and ``stderr``: click 8.1 mixes the two unless told not to."""
    options: dict[str, Any] = {}
    if "mix_stderr" in inspect.signature(CliRunner).parameters:
        options["mix_stderr"] = False
    return CliRunner(**options)
