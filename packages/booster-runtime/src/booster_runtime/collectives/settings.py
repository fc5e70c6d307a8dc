"""The environment variables of collectives: `BOOSTER_TRANSPORT` and `BOOSTER_DEBUG`. Nothing else reads them."""

from __future__ import annotations

import os

from booster_core.errors import ConfigError

AUTO, TORCH, DIRECT = "auto", "torch", "direct"
_TRANSPORT, _DEBUG, _COLLECTIVES = "BOOSTER_TRANSPORT", "BOOSTER_DEBUG", "collectives"
_FORMER = "BOOSTER_DIRECT_COLLECTIVES"


def requested_transport() -> str:
    """Return the transport that the user asked for: ``"auto"``, ``"torch"`` or ``"direct"``.

    Raises:
        ConfigError: If `BOOSTER_TRANSPORT` has another value, or the variable that it replaces is set.

    Collective: none.
    """
    if _FORMER in os.environ:
        wanted = TORCH if os.environ[_FORMER] == "0" else AUTO
        msg = f"{_FORMER} is not read any more. Unset it, and set {_TRANSPORT}={wanted} for the same effect."
        raise ConfigError(msg)
    text = os.environ.get(_TRANSPORT) or AUTO
    if text not in (AUTO, TORCH, DIRECT):
        msg = (
            f"{_TRANSPORT}={text!r} must be auto (read other processes' memory where every rank of a group can), "
            "torch (torch.distributed only) or direct (raise where the ranks can't read each other's memory)."
        )
        raise ConfigError(msg)
    return text


def checks_collectives() -> bool:
    """Return whether `BOOSTER_DEBUG` asks to compare collectives between ranks before they run.

    Raises:
        ConfigError: If `BOOSTER_DEBUG` lists anything but ``collectives``.

    Collective: none.
    """
    words = [word.strip() for word in os.environ.get(_DEBUG, "").split(",") if word.strip()]
    unknown = [word for word in words if word != _COLLECTIVES]
    if unknown:
        msg = f"{_DEBUG}={os.environ[_DEBUG]!r} lists {unknown[0]!r}; the only mode is {_COLLECTIVES!r}."
        raise ConfigError(msg)
    return bool(words)
