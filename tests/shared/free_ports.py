"""Ports on which tests serve."""

import contextlib
import random
import socket


def free_port():
    """Return a port of this host that is free, and that no connection of another program is given meanwhile."""
    for port in random.Random().sample(range(10_000, 32_000), 100):  # below what Linux gives to connections
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    msg = "None of 100 ports is free."
    raise RuntimeError(msg)
