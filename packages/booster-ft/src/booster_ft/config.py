"""`FaultToleranceConfig`: who the replica groups are, and how long they wait for each other."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from booster_core.errors import ConfigError

_LIGHTHOUSE, _REPLICA, _REPLICAS = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"


@dataclass(frozen=True, kw_only=True)
class FaultToleranceConfig:
    """Options of the plugin ``ft``.

    Args:
        min_replicas: Groups that a step needs at least; with fewer, all wait.
        spares: Count the gradients of exactly ``min_replicas`` groups, so that the global batch stays the same; others
            follow, and take the place of one that fails.
        replica_id: This group's number, from 0; by default the environment variable ``REPLICA_GROUP_ID``, else 0.
        num_replicas: Number of groups between which data is split, present or not; by default the environment variable
            ``NUM_REPLICA_GROUPS``, else 1.
        lighthouse: Address of the lighthouse, such as ``"http://host:29510"``; by default the environment variable
            ``TORCHFT_LIGHTHOUSE``. A single group needs none.
        timeout_seconds: How long a group waits in a step for another one, or for a rank of its own.
        quorum_timeout_seconds: How long a group waits between steps for the lighthouse and ``min_replicas`` groups.

    Raises:
        ConfigError: If a value is out of range.
    """

    min_replicas: int = 1
    spares: bool = False
    replica_id: int | None = None
    num_replicas: int | None = None
    lighthouse: str | None = None
    timeout_seconds: float = 60.0
    quorum_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("min_replicas", 1), ("num_replicas", 1), ("replica_id", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                msg = f"`{name}={value!r}` is not an integer of at least {least}."
                raise ConfigError(msg)
        for name in ("timeout_seconds", "quorum_timeout_seconds"):
            if not 1 <= getattr(self, name) < float("inf"):
                msg = f"`{name}={getattr(self, name)!r}` is not a number of seconds of at least 1."
                raise ConfigError(msg)

    def from_environment(self) -> FaultToleranceConfig:
        """Return these options, those left out filled in from the environment.

        Raises:
            ConfigError: If numbers don't fit each other, or several groups have no lighthouse.
        """
        found = replace(
            self,
            replica_id=_number(_REPLICA, 0) if self.replica_id is None else self.replica_id,
            num_replicas=_number(_REPLICAS, 1) if self.num_replicas is None else self.num_replicas,
            lighthouse=self.lighthouse or os.environ.get(_LIGHTHOUSE) or None,
        )
        replica_id, num_replicas = found.place
        if replica_id >= num_replicas:
            msg = (
                f"This is replica group {replica_id} of {num_replicas}: groups are numbered from 0. Start them by "
                f"`booster run-groups --groups N`, or set `{_REPLICA}` and `{_REPLICAS}`."
            )
            raise ConfigError(msg)
        if self.min_replicas > num_replicas:
            msg = f"`min_replicas={self.min_replicas}` is more than the {num_replicas} replica group(s) that there are."
            raise ConfigError(msg)
        if found.lighthouse is None and num_replicas > 1:
            msg = (
                f"{num_replicas} replica groups meet at a lighthouse, and none is named. Start one by `booster "
                f"lighthouse`, and set `{_LIGHTHOUSE}` to the address that it prints, or pass `lighthouse=`."
            )
            raise ConfigError(msg)
        return found

    @property
    def place(self) -> tuple[int, int]:
        """This group's number and that of all, where they are known."""
        return self.replica_id or 0, self.num_replicas or 1


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        msg = f"The environment variable `{name}` is '{text}', which is not a number."
        raise ConfigError(msg)
    return int(text) if text else default
