"""The environment variable of collectives, `BOOSTER_DEBUG`. Nothing else reads it."""

from __future__ import annotations

import os

from booster_core.errors import ConfigError

_DEBUG, _COLLECTIVES = "BOOSTER_DEBUG", "collectives"


def checks_collectives() -> bool:
    """Return whether `BOOSTER_DEBUG` asks to compare collectives between ranks before they run.

    Raises:
        ConfigError: If `BOOSTER_DEBUG` lists anything but ``collectives``.
    """
    words = [word.strip() for word in os.environ.get(_DEBUG, "").split(",") if word.strip()]
    unknown = [word for word in words if word != _COLLECTIVES]
    if unknown:
        msg = f"{_DEBUG}={os.environ[_DEBUG]!r} lists {unknown[0]!r}; the only mode is {_COLLECTIVES!r}."
        raise ConfigError(msg)
    return bool(words)
