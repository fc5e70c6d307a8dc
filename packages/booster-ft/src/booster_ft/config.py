"""`FaultToleranceConfig`: who the replica groups are, and how long they wait for each other."""

from __future__ import annotations

import os
from dataclasses import dataclass

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
        sync_every: Average parameters after this many steps (LocalSGD) in place of gradients in each, for slow links.

    Raises:
        ConfigError: If a value is out of range, numbers don't fit each other, or several groups have no lighthouse.
    """

    min_replicas: int = 1
    spares: bool = False
    replica_id: int | None = None
    num_replicas: int | None = None
    lighthouse: str | None = None
    timeout_seconds: float = 60.0
    quorum_timeout_seconds: float = 600.0
    sync_every: int | None = None

    def __post_init__(self) -> None:
        found = {"replica_id": _number(_REPLICA, 0), "num_replicas": _number(_REPLICAS, 1)}
        for name, value in {**found, "lighthouse": os.environ.get(_LIGHTHOUSE) or None}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # which is frozen
        for name, least in (("min_replicas", 1), ("num_replicas", 1), ("replica_id", 0), ("sync_every", 1)):
            value = getattr(self, name)
            if (value is not None or name != "sync_every") and (type(value) is not int or value < least):
                msg = f"`{name}={value!r}` is not an integer of at least {least}."
                raise ConfigError(msg)
        for name in ("timeout_seconds", "quorum_timeout_seconds"):
            if not 1 <= getattr(self, name) < float("inf"):
                msg = f"`{name}={getattr(self, name)!r}` is not a number of seconds of at least 1."
                raise ConfigError(msg)
        if problem := self._contradiction():
            raise ConfigError(problem)

    def _contradiction(self) -> str | None:
        replica_id, num_replicas = self.place
        if self.sync_every is not None and self.spares:
            return "`spares` keeps the global batch of each step; with `sync_every` groups step apart. Leave one out."
        if replica_id >= num_replicas:
            return (
                f"This is replica group {replica_id} of {num_replicas}: groups are numbered from 0. Start them by "
                f"`booster run --groups N`, or set `{_REPLICA}` and `{_REPLICAS}`."
            )
        if self.min_replicas > num_replicas:
            return (
                f"`min_replicas={self.min_replicas}` is more than the {num_replicas} replica group(s) that there are."
            )
        if self.lighthouse is None and num_replicas > 1:
            return (
                f"{num_replicas} replica groups meet at a lighthouse, and none is named. Start one by `booster "
                f"lighthouse`, and set `{_LIGHTHOUSE}` to the address that it prints, or pass `lighthouse=`."
            )
        return None

    @property
    def place(self) -> tuple[int, int]:
        """This group's number and that of all."""
        return self.replica_id or 0, self.num_replicas or 1


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        msg = f"The environment variable `{name}` is '{text}', which is not a number."
        raise ConfigError(msg)
    return int(text) if text else default


def require_torchft() -> None:
    """Import torchft, whose log begins at warnings unless ``RUST_LOG`` says otherwise: it has nine lines for each step.

    Raises:
        ConfigError: If that is not possible.
    """
    is_set = "RUST_LOG" in os.environ
    os.environ.setdefault("RUST_LOG", "warn")  # which torchft reads when it is imported
    try:
        import torchft  # noqa: F401 - whether it can be imported is the question
    except ImportError as error:
        msg = (
            f"Plugin 'ft' needs torchft, which can't be imported: {error}. Run `pip install 'torchft>=0.2'`; there are "
            "wheels for Linux on x86_64 and Python 3.9 to 3.13. Elsewhere, restart from checkpoints (`resume=True`)."
        )
        raise ConfigError(msg) from error
    finally:
        if not is_set:
            del os.environ["RUST_LOG"]
