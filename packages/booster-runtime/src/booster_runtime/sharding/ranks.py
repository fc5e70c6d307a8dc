"""Which ranks share the shards of one replica, which hold the same shard of others, and flags that any may raise."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_runtime import collectives
from booster_runtime.collectives import new_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from booster_runtime.collectives import Pending


@dataclass(frozen=True, kw_only=True)
class ShardingRanks:
    """This rank's place in hybrid sharding: state is split within a replica and repeated over replicas.

    Args:
        shard_group: The ranks of this replica, over which state is split; ``None`` for all ranks.
        shard_rank: This rank's index among them.
        shard_size: Their number.
        replica_group: The ranks that hold the same shard; ``None`` where there is one replica.
        replica_rank: This rank's index among them.
        holders: The ranks that hold the same parameters, of all replicas; ``None`` for all ranks. Others may hold other
            parameters, and reduce them at other times.
        num_shares: Number of ranks whose losses a gradient is of before it is reduced: more than 1 for experts that
            compute other ranks' tokens, too. Means are taken over these ranks as well.
        gather_group: The ranks of ``shard_group`` again, in a group for gathers of parameters: ranks may start
            reductions at other times among their gathers, and within a group all must make calls in one order.
            ``None`` gathers in ``shard_group``.
    """

    shard_group: ProcessGroup | None
    shard_rank: int
    shard_size: int
    replica_group: ProcessGroup | None = None
    replica_rank: int = 0
    holders: ProcessGroup | None = None
    num_shares: int = 1
    gather_group: ProcessGroup | None = None

    @property
    def gathering(self) -> ProcessGroup | None:
        """The group in which parameters are gathered; ``None`` for all ranks."""
        return self.shard_group if self.gather_group is None else self.gather_group


def sharding_groups(world_size: int, replica_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each replica, and for each shard the ranks that hold it.

    Args:
        world_size: Number of ranks.
        replica_size: Number of replicas.

    Raises:
        ConfigError: If ``replica_size`` does not divide the number of ranks.
    """
    if world_size % replica_size:
        divisors = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        msg = f"`replica_size={replica_size}` does not divide the world size {world_size}. Use one of {divisors}."
        raise ConfigError(msg)
    size = world_size // replica_size
    replicas = [list(range(first, first + size)) for first in range(0, world_size, size)]
    shards = [list(range(index, world_size, size)) for index in range(size)]
    return replicas, shards


def make_ranks(replica_size: int) -> ShardingRanks:
    """Return this rank's place, with process groups where there is more than one replica.

    Raises:
        ConfigError: If ``replica_size`` does not divide the number of ranks.

    Collective: every rank of the world.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replicas, shards = sharding_groups(world_size, replica_size)
    if replica_size == 1:
        return ShardingRanks(shard_group=None, shard_rank=rank, shard_size=world_size)
    size = world_size // replica_size
    return ShardingRanks(
        shard_group=new_groups(replicas),
        shard_rank=rank % size,
        shard_size=size,
        replica_group=new_groups(shards),
        replica_rank=rank // size,
    )


class RanksOfWorld:
    """Makes this rank's place once for each world, with its process groups.

    Args:
        replica_size: Number of replicas.
    """

    def __init__(self, replica_size: int) -> None:
        self._replica_size = replica_size
        self._made: tuple[object, ShardingRanks] | None = None

    def get(self, *, gathers_apart: bool = False) -> ShardingRanks:
        """Return this rank's place.

        Args:
            gathers_apart: Make a group for gathers of parameters; see `ShardingRanks`.

        Raises:
            ConfigError: If the number of replicas does not divide the number of ranks.

        Collective: every rank of the world.
        """
        world = dist.group.WORLD
        if self._made is None or self._made[0] is not world:
            self._made = (world, make_ranks(self._replica_size))
        ranks = self._made[1]
        if gathers_apart and ranks.gather_group is None:
            replicas, _ = sharding_groups(dist.get_world_size(), self._replica_size)
            ranks = replace(ranks, gather_group=new_groups(replicas))
            self._made = (world, ranks)
        return ranks


def control_device(device: torch.device, group: ProcessGroup | None = None) -> torch.device:
    """Return where ranks exchange small facts that each rank's host knows and wants to know of the others.

    A backend of devices runs collectives after everything that the device was given before, such as all of backward:
    a host that reads their result stops until then, and the device has nothing to do while the next work is prepared.

    Args:
        device: Where the run computes.
        group: The ranks; ``None`` for all.

    Returns:
        The CPU where the group has a backend for it, as `booster_core.launch` and ``init_process_group`` without a
        backend open it; else ``device``.
    """
    backends = dist.get_backend_config(group)
    return torch.device("cpu") if "cpu:" in backends else device


@contextlib.contextmanager
def raised_on_all(name: str, device: torch.device) -> Iterator[None]:
    """Raise on every rank what the body raises on any, as `DistCoordinator.together` does, of ranks that have all come.

    They exchange a flag, and meet in the store only where one has an error, or the flag of one did not come: the store
    tells whose.

    Args:
        name: What the user called; appears in messages.
        device: Where the run computes.

    Raises:
        MissingRanksError: If some ranks do not come to the end of the body.
        Exception: What the bodies raised.

    Collective: every rank of the world, at the end of the body.
    """
    coordinator = DistCoordinator()
    error: Exception | None = None
    lost: RuntimeError | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised below, with the others
        error = caught
    is_anywhere = error is not None
    if coordinator.world_size > 1:
        try:
            is_anywhere = any(AnyRankFlags(bytearray([is_anywhere]), device).wait())
        except RuntimeError as caught:
            lost = caught
    if is_anywhere or lost is not None:
        with coordinator.together(name):
            if error is not None:
                raise error
    if lost is not None:
        raise lost


class AnyRankFlags:
    """Flags of this rank on their way to the others of a group.

    Args:
        flags: A byte for each flag, 0 or 1; as many on every rank.
        device: Where the run computes; see `control_device`.
        group: The ranks; ``None`` for all.

    Collective: every rank of the group, in the same order among collectives.
    """

    def __init__(self, flags: bytearray, device: torch.device, group: ProcessGroup | None = None) -> None:
        self._flags = flags
        self._told: torch.Tensor | None = None
        self._pending: Pending | None = None
        if flags:
            own = torch.frombuffer(flags, dtype=torch.uint8)
            self._told = own.to(control_device(device, group))
            self._pending = collectives.all_reduce(self._told, dist.ReduceOp.MAX, group)

    def wait(self) -> bytes:
        """Return for each flag whether any rank has raised it, 0 or 1.

        Collective: none; the exchange was entered when it was started.
        """
        if self._pending is not None and self._told is not None:
            self._pending.wait()
            self._flags[:] = bytes(self._told.tolist())
            self._pending = None
        return bytes(self._flags)
