"""Which ranks share a host: its loopback, its files, its memory and its devices.

A host's name does not tell: cloned machines and containers often have the same one.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Host(NamedTuple):
    """Where a process runs. Processes with equal hosts reach each other by loopback and see one temporary folder.

    Args:
        name: The host's name.
        boot: Identifies the running kernel; empty, like the next two, where the system does not tell.
        network: Identifies the network namespace.
        files: Identifies the mount namespace.
    """

    name: str
    boot: str = ""
    network: str = ""
    files: str = ""

    @property
    def machine(self) -> tuple[str, str]:
        """Identifies the machine, whose processes share its devices."""
        return self.name, self.boot

    def to_text(self) -> str:
        """Return the host in a form for the store."""
        return "\n".join(self)

    @classmethod
    def from_text(cls, text: str) -> Host:
        """Return the host that `to_text` wrote."""
        return cls(*text.split("\n"))


def this_host() -> Host:
    """Return where this process runs.

    Collective: none.
    """
    boot = network = files = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        network = str(Path("/proc/self/ns/net").readlink())
        files = str(Path("/proc/self/ns/mnt").readlink())
    return Host(socket.gethostname(), boot, network, files)


def distinct_names(hosts: Sequence[Host]) -> list[str]:
    """Return a name for each host; hosts that share a name are numbered.

    Collective: none.
    """
    numbers: dict[str, dict[Host, int]] = {}
    for host in hosts:
        namesakes = numbers.setdefault(host.name, {})
        namesakes.setdefault(host, len(namesakes) + 1)
    return [h.name if len(numbers[h.name]) == 1 else f"{h.name} ({numbers[h.name][h]})" for h in hosts]
