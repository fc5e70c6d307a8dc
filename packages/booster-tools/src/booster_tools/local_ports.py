"""Ports at which ranks of this host meet."""

from __future__ import annotations

import contextlib
import random
import socket

from booster_core.errors import LaunchError

_TRIES = 100


def free_port() -> int:
    """Return a port of this host that is free, and that no connection of another program is given meanwhile.

    A port that the system chose would be one of those that it gives to connections too, and could be taken before the
    first rank serves there.

    Raises:
        LaunchError: If none of a hundred ports is free.
    """
    # A generator of its own: the script's is not to be advanced.
    for port in random.Random().sample(range(10_000, 32_000), _TRIES):  # noqa: S311 - below what Linux gives out
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
    msg = f"None of {_TRIES} ports of this host is free. End the programs that hold them."
    raise LaunchError(msg)
