"""Whether the ranks that work on one batch together were given the same one.

A loader that deals samples out by rank, or a collator that draws random numbers of its own, gives them different ones:
they would train on a mixture of both without a sign. Batches are compared by a checksum of their tensors, large ones by
a sample of their values, so that it takes less than a millisecond.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_core.state import as_bytes
from booster_runtime import collectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NOTHING = -(2**32)
"""Below all checksums, and all negative ones."""


_WHOLE_NUMEL = 8192
"""Tensors of more elements are sampled; different batches rarely differ in a few values alone."""


def checksum_of(batch: Any, turn: int = 0) -> int:
    """Return a number of 32 bits that batches with other tensors almost surely don't have.

    Args:
        batch: Tensors in any nest of dicts, lists and tuples; what is no tensor is not looked at.
        turn: The number of the batch: of large tensors, other values are looked at in each.
    """
    found = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            found = zlib.crc32(repr((leaf.dtype, tuple(leaf.shape))).encode(), found)
            found = zlib.crc32(as_bytes(_sample(leaf.detach(), turn).cpu().contiguous()), found)
    return found


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


def checksum_slots(checksum: int, index: int, count: int) -> list[int]:
    """Return numbers whose largest ones over all ranks tell in which replicas batches differ; see `differing`.

    Args:
        checksum: That of this rank's batch.
        index: Index of this rank's replica of the model.
        count: Number of replicas.
    """
    slots = [_NOTHING] * (2 * count)
    slots[2 * index : 2 * index + 2] = checksum, -checksum
    return slots


def differing(largest: list[int]) -> list[int]:
    """Return the indices of the replicas whose ranks have different batches, given the largest numbers of all slots."""
    return [index for index in range(len(largest) // 2) if largest[2 * index] != -largest[2 * index + 1]]


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
