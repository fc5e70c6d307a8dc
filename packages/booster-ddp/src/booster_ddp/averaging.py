"""Average gradients over all ranks without DDP's reducer, for steps in which the reducer did not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


def average_gradients(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, wire: torch.dtype | None = None
) -> list[int]:
    """Average gradients over all ranks in place.

    A parameter that a rank did not use counts as zero there, as under DDP; a parameter that no rank used keeps no
    gradient. Gradients that were averaged before keep their values; only what ranks have added since is averaged.

    Args:
        parameters: The trained parameters, the same on every rank.
        bucket_bytes: Size of the buckets in which gradients are averaged.
        wire: The format in which dense gradients are sent and summed, as torch's compression hooks do; ``None`` for
            their own.

    Returns:
        For each parameter the number of ranks that had a gradient.

    Collective: every rank of the world.
    """
    users = [[p.grad is not None, p.grad is not None and p.grad.is_sparse] for p in parameters]
    num_users = torch.tensor(users, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(num_users)
    gradients = []
    with torch.no_grad():
        for parameter, (count, num_sparse) in zip(parameters, num_users.tolist(), strict=True):
            if not count:
                continue
            if num_sparse == count:
                parameter.grad = _averaged_sparse(parameter)
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # another rank has a dense one
                parameter.grad = parameter.grad.to_dense()
            gradients.append(parameter.grad)
        _average(gradients, bucket_bytes, wire)
    counts: list[int] = num_users[:, 0].tolist()
    return counts


def _averaged_sparse(parameter: nn.Parameter) -> Tensor:
    """Return the average over all ranks of a gradient that is sparse on each rank that has one.

    It is reduced by itself, as in DDP's reducer.
    """
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        gradient = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)
    averaged = (gradient / dist.get_world_size()).coalesce()
    dist.all_reduce(averaged)
    return averaged


def _average(gradients: Sequence[Tensor], bucket_bytes: int, wire: torch.dtype | None) -> None:
    """Average gradients over all ranks in place, in buckets of one dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        num_bytes = 0
        for gradient in same_dtype:
            bucket.append(gradient)
            num_bytes += gradient.numel() * gradient.element_size()
            if num_bytes >= bucket_bytes:
                _average_bucket(bucket, wire)
                bucket, num_bytes = [], 0
        _average_bucket(bucket, wire)


def _average_bucket(bucket: Sequence[Tensor], wire: torch.dtype | None) -> None:
    if not bucket:
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    flat = (flat if wire is None else flat.to(wire)).div_(dist.get_world_size())
    dist.all_reduce(flat)
    sizes = [gradient.numel() for gradient in bucket]
    parts: Sequence[Tensor] = flat.split(sizes)  # type: ignore[no-untyped-call]
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
