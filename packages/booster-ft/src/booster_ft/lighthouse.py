"""Groups that live and are not there: at step 0 one of them may have all the steps of the run."""

from __future__ import annotations

import re
import time
import urllib.request
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

from booster_core.errors import LaunchError
from booster_core.log import log

if TYPE_CHECKING:
    from booster_ft.config import FaultToleranceConfig
    from booster_ft.manager import GroupManager

_LIVES = re.compile(r'<li class="heartbeat\s*">\s*(\S+): seen')
_MEMBER = re.compile(r"<b>(\S+)</b>")
_PAUSE_SECONDS = 0.5


class MissingGroups:
    """Groups that send heartbeats to the lighthouse and are not in its last quorum.

    Such as the only survivor of a failure, while it is in the step that failed and the others are back already. A
    quorum without it would begin the run a second time, at step 0.

    Args:
        config: With the values of the environment.
        device: Where groups communicate.
    """

    def __init__(self, config: FaultToleranceConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._since: float | None = None

    def are_awaited(self, manager: GroupManager) -> bool:
        """Return whether any group of a quorum sees one that is missing, after a while in which that may have come.

        Called by the first rank of each group.

        Raises:
            LaunchError: If it has not come within the time limit of a quorum.
        """
        config = self._config
        if config.lighthouse is None or manager.errored() is not None:
            return False
        try:
            missing = groups_outside(config.lighthouse, f"group_{config.replica_id}", config.timeout_seconds)
        except OSError as error:
            manager.report_error(error)  # this step is not taken
            return False
        count = torch.tensor([len(missing)], device=self._device)
        manager.allreduce(count, reduce_op=ReduceOp.SUM).wait()
        if manager.errored() is not None or not count.item():
            self._since = None
            return False
        names = ", ".join(missing) or "a group that others see"
        if self._since is None:
            self._since = time.monotonic()
            log.warning(
                "Replica group %d waits for %s: it lives, and may have the steps of this run.", config.replica_id, names
            )
        if time.monotonic() - self._since > config.quorum_timeout_seconds:
            msg = (
                f"Replica group {config.replica_id} would begin at step 0 without {names}, which lives, may have the "
                f"steps of this run, and did not come within {config.quorum_timeout_seconds:g} s. If it hangs, end it. "
                "`quorum_timeout_seconds` says how long to wait."
            )
            raise LaunchError(msg)
        time.sleep(_PAUSE_SECONDS)
        return True


def groups_outside(address: str, own_name: str, timeout_seconds: float) -> list[str]:
    """Return the names of groups that live and are not in the last quorum, sorted.

    Only the lighthouse's page for people tells: torchft's clients don't.

    Args:
        address: Of the lighthouse, as a URL.
        own_name: Of this group. Where the page does not show it as one that lives and takes part, as when others have
            met again without it, or if the page is another, nobody knows who is missing, and its name is returned.
        timeout_seconds: How long to wait for an answer.

    Raises:
        OSError: If the lighthouse does not answer.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{address.rstrip('/')}/status", timeout=timeout_seconds) as answer:
        page = answer.read().decode()
    living, members = ({name.partition(":")[0] for name in kind.findall(page)} for kind in (_LIVES, _MEMBER))
    return sorted(living - members) if own_name in living & members else [own_name]
