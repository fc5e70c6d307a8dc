"""Gather and reduce units on the CPU by `booster_runtime.collectives`, which are faster than gloo's.

Sums are in rank order and in fp32. Other devices use torch's defaults.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError
from booster_core.ranks import current_world
from booster_fsdp._torch_private import trained_of
from booster_runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule

    from booster_runtime.collectives import Pending


MOST_RANKS = 8
"""With more, gloo's own collectives take over: here each rank sends to every other one."""
_PATIENCE_SECONDS = 5.0
"""How long a rank waits for others before it asks them what they run."""
_LOOK_SECONDS = 0.5
_CLOSING_TAG = 7021
"""Of a message that nobody sends; booster-runtime has others."""
_NUM_MARKS = 65_521


def use_runtime_collectives(units: Mapping[str, FSDPModule]) -> None:
    """Let units use the collectives of booster-runtime, if this version of torch supports that.

    Args:
        units: The units by name, in an order that is the same on every rank.
    """
    names, waits = list(units), Waits(list(units.values()))
    for number, unit in enumerate(units.values()):
        module: Any = unit  # the protocols of these two have no public name
        if hasattr(module, "set_custom_all_gather") and hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_all_gather(_AllGather(names, number, waits))
            module.set_custom_reduce_scatter(_ReduceScatter(names, number, waits))


def different_units(what: str) -> ConfigError:
    """Return the error for ranks that run different units."""
    return ConfigError(
        f"Ranks run different units of the model: {what}. FSDP gathers and reduces a unit on all ranks together. Run "
        "the same units on every rank, such as on an input of zeros whose output has no weight in the loss; choose "
        "larger units, as by `TorchFSDPPlugin(unit_min_numel=...)`; or use plugin='ddp' or 'zero'."
    )


def check_trained(trained: Mapping[str, bool], ranks: Sequence[int], of_ranks: Sequence[bytes]) -> None:
    """Raise if ranks train other parameters, which is why they run other units.

    Args:
        trained: This rank's, by name.
        ranks: Which ranks.
        of_ranks: Whether each of them trains each parameter.

    Raises:
        ConfigError: If they do.
    """
    for name, flags in zip(trained, zip(*of_ranks, strict=True), strict=False):
        if len(set(flags)) > 1:
            frozen, others = (
                ", ".join(str(rank) for rank, own in zip(ranks, flags, strict=True) if own == flag) for flag in (0, 1)
            )
            msg = (
                f"Parameter '{name}' is frozen on rank {frozen} and trained on rank {others}. FSDP reduces gradients "
                "on all ranks together. Freeze and unfreeze the same parameters on every rank, before its forward."
            )
            raise ConfigError(msg)


class _Wait(NamedTuple):
    """A unit's collective that this rank is in: its number, what it does, the unit, elements, ranks and beginning."""

    serial: int
    verb: str
    number: int
    numel: int
    group: ProcessGroup
    since: float


class Waits:
    """Finds out why this rank waits in a unit's collective, once that has taken some seconds.

    Ranks that run different units, or train other parameters of one, send under other marks, so that no values mix:
    all of them wait. A thread then leaves in the store what this rank runs and looks for what the others do. Where that
    differs, it ends the group's connections, so that every rank's wait raises.

    Args:
        units: The units.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units
        self._num_waits = 0
        self._current: _Wait | None = None
        self._is_watched = False
        self._seen: dict[str, bytes] = {}

    def wait(
        self, pending: Pending, verb: str, names: Sequence[str], number: int, numel: int, group: ProcessGroup
    ) -> None:
        """Wait for a unit's collective.

        Raises:
            ConfigError: If ranks of the group are in different ones.
        """
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=_look, args=(weakref.ref(self),), name="booster-fsdp", daemon=True).start()
        self._num_waits += 1
        self._current = wait = _Wait(self._num_waits, verb, number, numel, group, time.monotonic())
        try:
            pending.wait()
        except RuntimeError as error:
            other = None
            with contextlib.suppress(RuntimeError):  # the store's, where its host has ended
                other = next(self._others(wait), None)
            if other is None:
                raise
            _, _, rank, trained, other_verb, other_number, other_numel = other
            of_both = [bytes(self._trained().values()), bytes.fromhex(trained)]
            check_trained(self._trained(), [current_world().rank, rank], of_both)
            raise _difference(names, wait, rank, other_verb, other_number, other_numel) from error
        finally:
            self._current = None

    def look(self) -> None:
        """End the wait in which this rank has been for long, where others are in another one."""
        wait = self._current
        if wait is None or time.monotonic() - wait.since < _PATIENCE_SECONDS:
            return
        # What another run has left in the store stays as it is.
        others = {key: value for key, value, *_ in self._others(wait)}
        is_sure = any(self._seen.get(key, value) != value for key, value in others.items())
        self._seen = others
        if is_sure:
            # gloo ends all connections of a group in which a wait has taken longer than it may.
            peer = (wait.group.rank() + 1) % wait.group.size()
            with contextlib.suppress(RuntimeError):
                work: Any = dist.irecv(torch.empty(1), group=wait.group, group_src=peer, tag=_CLOSING_TAG)
                work.wait(timedelta(milliseconds=1))

    def _trained(self) -> dict[str, bool]:
        return trained_of(self._units)

    def _others(self, wait: _Wait) -> Iterator[tuple[str, bytes, int, str, str, int, int]]:
        """Say what this rank waits for, and yield who waits for something else: trained parameters, and for what."""
        world = current_world()
        if world.store is None:
            return
        start = f"fsdp/{wait.group.group_name}/{wait.serial}"
        trained = bytes(self._trained().values()).hex()
        told = json.dumps([wait.verb, wait.number, wait.numel, trained, time.monotonic()])
        world.store.set(f"{start}/{world.rank}", told)
        for rank in dist.get_process_group_ranks(wait.group):
            key = f"{start}/{rank}"
            if world.store.check([key]):
                value = world.store.get(key)
                verb, number, numel, of_rank, _ = json.loads(value)
                if (verb, number, numel) != (wait.verb, wait.number, wait.numel):
                    yield key, value, rank, of_rank, verb, number, numel


def _look(reference: weakref.ref[Waits]) -> None:
    while (waits := reference()) is not None:
        with contextlib.suppress(RuntimeError):  # the store's, when its host has ended
            waits.look()
        del waits
        time.sleep(_LOOK_SECONDS)


def _difference(names: Sequence[str], wait: _Wait, other_rank: int, verb: str, number: int, numel: int) -> ConfigError:
    """Return the error for this rank and another one that waits for another collective."""
    rank = current_world().rank
    here, there = (f"'{names[each]}'" if names[each] else "the model itself" for each in (wait.number, number))
    if number != wait.number:
        return different_units(f"rank {rank} runs {here}, and rank {other_rank} {there}")
    if verb != wait.verb:
        return different_units(f"rank {rank} {wait.verb} {here}, and rank {other_rank} {verb} it")
    return ConfigError(
        f"Rank {rank} sends {wait.numel} elements of {here}, and rank {other_rank} sends {numel}: they have trained "
        "other parameters of it since the last step. Freeze and unfreeze the same ones on all ranks."
    )


class _OfUnit:
    verb: ClassVar[str]

    def __init__(self, names: Sequence[str], number: int, waits: Waits) -> None:
        self._names, self._number, self._waits = names, number, waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for torch to fill."""
        return torch.empty(size, dtype=dtype, device=device)

    def _mark(self, numel: int) -> int:
        """Return what ranks send this under; that of another unit, or of other parameters of it, is another one."""
        return (self._number * 7919 + numel) % _NUM_MARKS

    def _wait(self, pending: Pending, numel: int, group: ProcessGroup) -> None:
        self._waits.wait(pending, self.verb, self._names, self._number, numel, group)


class _AllGather(_OfUnit):
    verb = "gathers"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Gather the ranks' inputs; blocks until the end."""
        del async_op
        numel, own_numel = output_tensor.numel(), input_tensor.numel()
        start = group.rank() * own_numel
        own = output_tensor[start : start + own_numel]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        bounds = range(0, numel + 1, max(own_numel, 1))
        self._wait(collectives.all_gather(output_tensor, bounds, group, mark=self._mark(numel)), numel, group)


class _ReduceScatter(_OfUnit):
    verb = "reduces"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Reduce the ranks' inputs; blocks until the end."""
        del async_op
        is_mean = op == dist.ReduceOp.AVG
        if not is_mean and op != dist.ReduceOp.SUM:
            call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            call(output_tensor, input_tensor, op=op, group=group)
            return
        scale = 1.0 / group.size() if is_mean else 1.0
        numel = input_tensor.numel()
        bounds = range(0, numel + 1, max(output_tensor.numel(), 1))
        pending = collectives.reduce_scatter(
            input_tensor, bounds, output_tensor, group, scale=scale, mark=self._mark(numel)
        )
        self._wait(pending, numel, group)
