"""The lease of a root: of several jobs that save there, only the newest may.

A job that was given up and replaced may still run, as behind a network that was cut. It must not remove or replace the
steps of its successor. So a small file under the root says which process may save there. The last one to take it wins,
at once: a run that restarts by itself never waits for a lease to expire. An earlier job finds out before it changes
anything.
"""

from __future__ import annotations

import functools
import json
import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from booster_checkpoint.storage.location import new_token
from booster_core.errors import CheckpointError
from booster_core.log import log
from booster_core.ranks import this_host

if TYPE_CHECKING:
    from booster_checkpoint.run.checkpoint_root import CheckpointRoot

LEASE = "lease.json"


class Leases:
    """The roots that an engine may save into. Used on rank 0, which tells the others."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    def take(self, run: CheckpointRoot) -> None:
        """Take the lease of a root, from whoever has it.

        Raises:
            OSError: If it can't be written.
        """
        found = _read(run)
        self._held.add(run.root.identity)
        if found is not None and found.get("token") == _token(os.getpid()):
            return
        generation = found.get("generation") if found is not None else 0
        content = {
            "generation": generation + 1 if isinstance(generation, int) else 1,
            "token": _token(os.getpid()),
            "host": this_host().name,
            "pid": os.getpid(),
            "taken_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        (run.root / LEASE).write_bytes(f"{json.dumps(content)}\n".encode())
        if found is not None:
            log.info("This job saves into '%s' from here on, in place of %s.", run, _described(found))

    def hold(self, run: CheckpointRoot) -> None:
        """Make sure that this job may save into a root; take the lease where it has not been taken here.

        Raises:
            CheckpointError: If another job took it since.
            OSError: If it can't be written.
        """
        found = _read(run)
        is_lost = found is not None and found.get("token") != _token(os.getpid())
        if is_lost and run.root.identity in self._held:
            assert found is not None, "a lost lease is another's"
            msg = (
                f"Another job saves into '{run}' now: {_described(found)}. This one has changed nothing there "
                "since, and may no longer save. If it is an earlier attempt of the same run, end it; if not, let one "
                "of the two save into another folder."
            )
            raise CheckpointError(msg)
        if is_lost or found is None:
            self.take(run)
        self._held.add(run.root.identity)


@functools.cache
def _token(pid: int) -> str:
    """Return text that no other process uses; a process may have several Boosters."""
    del pid
    return new_token()


def _read(run: CheckpointRoot) -> dict[str, Any] | None:
    """Return what the lease says; ``None`` where there is none. Of a damaged one nothing is known."""
    text = (run.root / LEASE).read_bytes()
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _described(lease: dict[str, Any]) -> str:
    facts = {name: str(lease.get(name))[:100] for name in ("generation", "host", "pid", "taken_at")}
    return f"process {facts['pid']} of '{facts['host']}' (job {facts['generation']}, since {facts['taken_at']})"
