"""Whether ranks that compute the same train the same: batches, parameters, and their values.

A loader that deals samples out by rank, or a collator that draws random numbers of its own, gives ranks that work on
one batch together different ones: they would train on a mixture of both without a sign. Batches are compared by a
checksum of their tensors, large ones by a sample of their values, so that it takes less than a millisecond, and what is
compared goes with what ranks send each other anyway. A script may freeze a parameter on one rank, or give ranks other
random numbers: they would diverge, or wait for each other, without a sign of why.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError, GradientError
from booster_core.ranks import digest
from booster_core.state import NamedTensors, byte_view
from booster_runtime import collectives
from booster_runtime.memory import is_absent
from booster_runtime.sharding import control_device

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from booster_hybrid.mesh import Axis
    from booster_hybrid.state import LocalModel


class ToHost:
    """Begins to copy a tensor to the host.

    Args:
        tensor: On any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._arrived = None if tensor.device.type == "cpu" else torch.Event(tensor.device)
        if self._arrived is not None:
            self._arrived.record()

    @property
    def is_here(self) -> bool:
        """Whether it was on the host."""
        return self._arrived is None

    def wait(self) -> torch.Tensor:
        """Return the copy, once the device has come to where it was begun."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


_WHOLE_NUMEL = 8192
"""Tensors of more elements are sampled; different batches rarely differ in a few values alone."""


def checksum_of(batch: Any, turn: int = 0) -> int:
    """Return a number of 32 bits that batches with other tensors almost surely don't have.

    Args:
        batch: Tensors in any nest of dicts, lists and tuples; what is no tensor is not looked at.
        turn: The number of the batch: of large tensors, other values are looked at in each.
    """
    found = 0
    for leaf in _tensors_of(batch):
        found = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), found)
        found = zlib.crc32(_bytes_of(leaf, turn).cpu().numpy().data, found)
    return found


def _tensors_of(batch: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def _bytes_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    return byte_view(_sample(tensor.detach(), turn).contiguous())


class BatchNumbers:
    """Numbers each batch of a rank, without a wait for a device.

    Values on a device are on their way to the host meanwhile, so that they count in the number of the batch that
    follows.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._before: ToHost | None = None

    def take(self, batch: Any) -> int:
        """Return the number of the next batch.

        Args:
            batch: As for `checksum_of`.
        """
        self._turn += 1
        tensors = _tensors_of(batch)
        here = [leaf for leaf in tensors if leaf.device.type == "cpu"]
        others = [leaf for leaf in tensors if leaf.device.type != "cpu"]
        form = repr([(leaf.dtype, tuple(leaf.shape)) for leaf in others])
        before = 0 if self._before is None else zlib.crc32(self._before.wait().numpy().data)
        self._before = ToHost(torch.stack([_sum_of(leaf, self._turn) for leaf in others])) if others else None
        number = zlib.crc32(form.encode(), before)
        return zlib.crc32(checksum_of(here, self._turn).to_bytes(4, "little"), number)


def _sum_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return a sum of a tensor's bytes that depends on their order, on its device."""
    values = _bytes_of(tensor, turn).long()
    return (values * torch.arange(1, 1 + values.numel(), device=values.device)).sum()


def _sample(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return a small tensor as it is, and of a large one values at equal distances."""
    numel = tensor.numel()
    if numel <= _WHOLE_NUMEL:
        return tensor
    step = -(-numel // _WHOLE_NUMEL)
    places = torch.arange(turn % step, numel, step, device=tensor.device)
    if tensor.is_contiguous():
        return tensor.view(-1)[places]
    return tensor[torch.unravel_index(places, tensor.shape)]


def different_batches(ranks: list[int]) -> ConfigError:
    """Return the error that tells of ranks with different batches.

    Args:
        ranks: The ranks that work on one batch together.
    """
    return ConfigError(
        f"Ranks {', '.join(map(str, ranks))} work on one batch together, but were given different ones. Use the data "
        "loader that `boost` or `prepare_dataloader` returned; where samplers, collators or augmentation of your own "
        "draw random numbers, let these ranks draw the same (from a generator seeded alike, not the global one)."
    )


def check_same_batch(batch: Any, group: ProcessGroup, ranks: list[int]) -> None:
    """Raise on all ranks of a group if they have different batches.

    Args:
        batch: As for `checksum_of`.
        group: Ranks that work on one batch together.
        ranks: Their ranks in the world.

    Raises:
        ConfigError: If they have different ones.

    Collective: the group.
    """
    if len(set(collectives.all_gather_object(checksum_of(batch), group))) > 1:
        raise different_batches(ranks)


_MOST_LISTED = 4


class RequiresGradCheck:
    """Compares, in each forward, the batches of ranks that share one, and which parameters they train.

    The ranks' hosts exchange four numbers before the forward: those with other shapes would wait in its layers.

    Args:
        model: The user's model.
        replica: The ranks.
        device: Where the model computes.
    """

    def __init__(self, model: nn.Module, replica: Axis, device: torch.device) -> None:
        self._parameters = dict(model.named_parameters())
        self._replica = replica
        self._device = control_device(device, replica.group)
        self._batches = BatchNumbers()

    def check(self, batch: Any) -> None:
        """Raise on all ranks if they have different batches, or some train a parameter that others have frozen.

        Args:
            batch: What the model is called with; values on a device are compared in the next forward.

        Raises:
            ConfigError: If so, naming the ranks, or the first parameter.

        Collective: the ranks.
        """
        flags = bytes(parameter.requires_grad for parameter in self._parameters.values())
        number, trained = self._batches.take(batch), zlib.crc32(flags)
        told = torch.tensor([number, -number, trained, -trained], device=self._device)
        collectives.all_reduce(told, dist.ReduceOp.MAX, self._replica.group).wait()
        most, least, most_trained, least_trained = told.tolist()
        if most != -least:
            raise different_batches(list(self._replica.ranks))
        if most_trained != -least_trained:
            self._refuse_frozen(flags)

    def _refuse_frozen(self, flags: bytes) -> None:
        of_ranks = collectives.all_gather_object(flags, self._replica.group)
        for name, flags_of in zip(self._parameters, zip(*of_ranks, strict=True), strict=True):
            if len(set(flags_of)) > 1:
                frozen, trained = (
                    ", ".join(str(rank) for rank, own in zip(self._replica.ranks, flags_of, strict=True) if own == flag)
                    for flag in (0, 1)
                )
                msg = (
                    f"Parameter '{name}' is frozen on rank {frozen} and trained on rank {trained}, which work on one "
                    "batch together. Call `requires_grad_` alike on all ranks."
                )
                raise ConfigError(msg)


def check_copies(model: nn.Module, local: LocalModel, replica: Axis) -> None:
    """Raise on all ranks of a replica if what several of them hold of parameters differs.

    Args:
        model: The user's model, split.
        local: What is here of it.
        replica: The ranks.

    Raises:
        GradientError: If so, naming parameters and ranks.

    Collective: the ranks.
    """
    names = NamedTensors.of(model).name_of
    own = {}
    for parameter in model.parameters():
        name = names[id(parameter)]
        split = local.splits.get(name)
        if not is_absent(parameter) and (split is None or split.is_shared):
            own[name, None if split is None else split.ranges] = digest(parameter)
    seen: dict[Any, dict[bytes, list[int]]] = {}
    for rank, found in zip(replica.ranks, collectives.all_gather_object(own, replica.group), strict=True):
        for key, value in found.items():
            seen.setdefault(key, {}).setdefault(value, []).append(rank)
    apart = {name: list(by.values()) for (name, _), by in seen.items() if len(by) > 1}
    if not apart:
        return
    listed = [
        f"'{name}' (rank {' against rank '.join(', '.join(map(str, ranks)) for ranks in by)})"
        for name, by in list(apart.items())[:_MOST_LISTED]
    ]
    more = f" and {len(apart) - _MOST_LISTED} more" if len(apart) > _MOST_LISTED else ""
    msg = (
        f"After the first step {len(apart)} parameter(s) differ between ranks that hold the same: {', '.join(listed)}"
        f"{more}. These ranks have computed with other random numbers or other data, or the script has changed values "
        "or gradients on some of them only."
    )
    raise GradientError(msg)
