"""Which groups are alive, and `RankWatch`: a replica group is alive only while all of its ranks are.

The lighthouse hears of a group from its first rank alone. If another rank stops, that one waits in a collective and
goes on to be heard, and all other groups would wait for it. So each rank watches the one before it in a ring.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

from booster_core.errors import LaunchError

if TYPE_CHECKING:
    from booster_core.ranks import DistCoordinator

_LIVES = re.compile(r'<li class="heartbeat\s*">\s*(\S+): seen')
_MEMBER = re.compile(r"<b>(\S+)</b>")


class RankWatch:
    """A thread that ends this process, and so its group, once the rank before it shows no sign of life.

    It counts its own ticks, not time: a group that was stopped as a whole goes on.

    Args:
        coordinator: Of the group's ranks; one rank is not watched.
        timeout_seconds: The group's time limit; a rank that is silent for a third of it counts as stopped.

    Collective: every rank of the group.
    """

    def __init__(self, coordinator: DistCoordinator, timeout_seconds: float) -> None:
        size, self._num_ticks = coordinator.world_size, max(3, int(timeout_seconds / 3))
        self._before, self._end = (coordinator.rank - 1) % size, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="booster-ft rank watch", daemon=True)
        if size == 1:
            return
        family = socket.AF_INET6 if (both := socket.has_dualstack_ipv6()) else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
            server.settimeout(timeout_seconds)
            address = socket.gethostname(), server.getsockname()[1]
            addresses = coordinator.all_gather_object(address, name="step")
            self._to_next = socket.create_connection(addresses[(coordinator.rank + 1) % size], timeout_seconds)
            self._from_before, _ = server.accept()
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and being watched."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        num_silent = 0
        with self._to_next, self._from_before, suppress(OSError):  # one that has ended is the launcher's to see
            self._to_next.settimeout(0.0)
            self._from_before.settimeout(0.0)
            while not self._end.wait(1.0):
                with suppress(BlockingIOError):  # one that reads nothing
                    self._to_next.send(b".")
                try:
                    if not self._from_before.recv(1 << 16):
                        return
                    num_silent = 0
                except BlockingIOError:
                    num_silent += 1
                if num_silent >= self._num_ticks:
                    why = f"rank {self._before} gave no sign of life for {num_silent} s. Restart it: it catches up."
                    print(f"Booster: this replica group ends, since {why}", file=sys.stderr, flush=True)  # noqa: T201 - the process ends here
                    os._exit(77)


def groups_outside(address: str, own_name: str, timeout_seconds: float) -> list[str]:
    """Return the names of groups that live and are not in the last quorum, sorted.

    Only the lighthouse's page for people tells: torchft's clients don't.

    Args:
        address: Of the lighthouse, as a URL.
        own_name: Of this group. Where the page does not show it as one that lives and takes part, nobody knows who is
            missing, and its name is returned.
        timeout_seconds: How long to wait for an answer.

    Raises:
        OSError: If the lighthouse does not answer.
        LaunchError: If its page has another form than this package reads.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{address.rstrip('/')}/status", timeout=timeout_seconds) as answer:
        page = answer.read().decode()
    living, members = ({name.partition(":")[0] for name in kind.findall(page)} for kind in (_LIVES, _MEMBER))
    if f"{own_name}:" in page and own_name not in living | members:
        msg = (
            f"The lighthouse at {address} is of a torchft whose page says in another form which groups live, so nobody "
            "knows whether one of them has the steps of this run. Start the lighthouse with torchft 0.2, or use a "
            "later release of booster-ft."
        )
        raise LaunchError(msg)
    return sorted(living - members) if own_name in living & members else [own_name]
