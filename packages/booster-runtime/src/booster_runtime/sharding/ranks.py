"""Which ranks share the shards of one replica, and which hold the same shard of others: flags, and the first's values.

Any rank may raise a flag that all see. Every rank gets the first rank's values at `boost`, and those of buffers that
forward has changed after a step.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_runtime import collectives
from booster_runtime.collectives import new_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
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


_MESSAGE_BYTES = 32 << 20


def agree_on_values(model: nn.Module) -> None:
    """Give every rank the first rank's parameters and buffers, whatever seeds the ranks built the model with.

    Collective: every rank of the world.
    """
    send_first(tensor.data for tensor in [*model.parameters(), *model.buffers()])


def send_first(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Give every rank of a group (``None`` for all) the first rank's values of tensors of any strides.

    Small ones travel together, those of one format and device in one message.

    Args:
        tensors: Of the same shapes, formats and order on every rank.
        group: The ranks; ``None`` for all.

    Collective: every rank of the group.
    """
    for together in _messages(tensors):
        dense = [each.contiguous() for each in together]
        # Backends move numbers; truth values are bytes to them.
        sent = [each.view(torch.uint8) if each.dtype == torch.bool else each for each in dense]
        if len(sent) == 1:
            collectives.broadcast(sent[0], group).wait()
        else:
            flat = torch.cat([each.reshape(-1) for each in sent])
            collectives.broadcast(flat, group).wait()
            parts = torch.split(flat, [each.numel() for each in sent])
            with torch.inference_mode():  # which lets buffers be written that were made in it
                torch._foreach_copy_(sent, [part.view(each.shape) for part, each in zip(parts, sent, strict=True)])
        for each, received in zip(together, dense, strict=True):
            if received is not each:
                each.copy_(received)


def _messages(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one format and device together, of at most `_MESSAGE_BYTES` where there are several."""
    begun: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    num_bytes: dict[tuple[torch.device, torch.dtype], int] = {}
    for each in tensors:
        key = each.device, each.dtype
        if num_bytes.get(key, 0) + each.nbytes > _MESSAGE_BYTES and key in begun:
            yield begun.pop(key)
            num_bytes[key] = 0
        begun.setdefault(key, []).append(each)
        num_bytes[key] = num_bytes.get(key, 0) + each.nbytes
    yield from begun.values()


class BufferWatch:
    """Notices changes of a model's buffers, by torch's version counters.

    Kernels of normalisation layers write running statistics past those; they count as changed while the layer trains.

    Args:
        model: The user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._named: dict[str, nn.Module] = {}
        self._inside: list[nn.Module | None] | None = None
        self.forget()

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name, the same names on every rank."""
        found: dict[int, tuple[str, Tensor]] = {}  # each once, under its first name
        for prefix, module in self._modules().items():
            # The public generators take most of the time, and most modules have none.
            for name, buffer in module._buffers.items() if module._buffers else ():  # noqa: SLF001
                if buffer is not None:
                    found.setdefault(id(buffer), (f"{prefix}.{name}" if prefix else name, buffer))
        return dict(found.values())

    def _modules(self) -> dict[str, nn.Module]:
        """Return the model's modules by name, which are searched for again where one has other children than before."""
        if self._children() != self._inside:
            self._named = dict(self._model.named_modules())
            self._inside = self._children()
        return self._named

    def _children(self) -> list[nn.Module | None]:
        parents = [module._modules for module in self._named.values()]  # noqa: SLF001 - as above
        return [child for children in parents if children for child in children.values()]

    def changed(self) -> list[bool]:
        """Return for each buffer whether it has changed since `forget`."""
        statistics = {
            id(buffer)
            for module in self._modules().values()
            if module._buffers and isinstance(module, nn.modules.batchnorm._NormBase) and module.training  # noqa: SLF001 - their common base
            for buffer in module.buffers(recurse=False)
        }
        return [
            id(buffer) in statistics
            or name not in self._seen
            or self._seen[name][0] is not buffer
            or self._seen[name][1] != _version(buffer)
            for name, buffer in self.buffers().items()
        ]

    def send_changed(self, has_changed: Sequence[bool], group: ProcessGroup | None = None) -> None:
        """Give every rank the first rank's values of some buffers, and count all as unchanged.

        Args:
            has_changed: For each buffer, in the order of `changed`, whether it changed on any rank.
            group: The ranks that share the values; ``None`` for all.

        Collective: the group, where any buffer has changed; else none.
        """
        if not any(has_changed):
            return
        send_first(compress(self.buffers().values(), has_changed), group)
        self.forget()

    def forget(self) -> None:
        """Count all buffers as unchanged from now on."""
        self._seen = {name: (buffer, _version(buffer)) for name, buffer in self.buffers().items()}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - how autograd notices changes too
