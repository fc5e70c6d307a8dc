"""The global norm of gradients that may be spread over ranks, each element counted exactly once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, GradientError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


def check_norm_arguments(max_norm: float, norm_type: float) -> None:
    """Check what a user passed to ``clip_grad_by_norm``, before any communication.

    Raises:
        ConfigError: If ``max_norm`` is negative or NaN, or ``norm_type`` is not positive.
    """
    if not max_norm >= 0:
        msg = f"`max_norm={max_norm}` must be 0 or more; it is the largest global norm that gradients keep."
        raise ConfigError(msg)
    if not norm_type > 0:
        msg = f"`norm_type={norm_type}` must be positive, or inf for the largest magnitude."
        raise ConfigError(msg)


def global_norm(gradients: Iterable[Tensor], norm_type: float = 2.0, *, groups: Sequence[ProcessGroup] = ()) -> Tensor:
    """Return the norm of all gradients, over this rank and the given groups.

    The sum over elements is carried in fp32 (fp64 for fp64 gradients) whatever the gradients' format.

    Args:
        gradients: The gradients, or parts of them, that are counted on this rank; any shapes. Over all ranks of the
            groups every element of the model must appear once: a replicated gradient is passed by one rank only, or
            its group is left out.
        norm_type: Order of the norm, positive; ``inf`` for the largest magnitude.
        groups: Process groups over which the elements are spread, as the axes of a mesh are; summed over one
            after the other.

    Returns:
        A scalar tensor on the gradients' device, the same on every rank of the groups.

    Collective: every rank of ``groups``, also a rank that has no gradients; none when ``groups`` is empty.
    """
    present = [gradient.detach() for gradient in gradients if gradient.numel()]
    device = present[0].device if present else _group_device(groups)
    wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in present) else torch.float32
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in present:
        by_device.setdefault(gradient.device, []).append(gradient)
    parts = [
        part.to(device=device, dtype=wide)
        for tensors in by_device.values()
        for part in _tensor_norms(tensors, norm_type, wide)
    ]
    total = (
        torch.linalg.vector_norm(torch.stack(parts), norm_type) if parts else torch.zeros((), dtype=wide, device=device)
    )
    if not groups:
        return total
    if math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total
    total = total.pow_(norm_type)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.pow_(1.0 / norm_type)


def check_finite_norm(norm: Tensor) -> None:
    """Raise where a global norm is not finite.

    Raises:
        GradientError: If the norm is infinite or NaN; every rank sees the same norm and raises alike.
    """
    if not bool(norm.isfinite()):
        msg = (
            f"The global norm of the gradients is {float(norm)}, and `error_if_nonfinite=True` forbids that. "
            "Lower the learning rate, look for infinities in the batch, or pass `error_if_nonfinite=False`."
        )
        raise GradientError(msg)


def _tensor_norms(tensors: list[Tensor], norm_type: float, wide: torch.dtype) -> Sequence[Tensor]:
    """Return the norm of each tensor of one device, in a few kernels where torch has them."""
    if all(tensor.dtype == wide for tensor in tensors):
        return torch._foreach_norm(tensors, norm_type)  # noqa: SLF001 - the kernel behind torch's clip_grad_norm_
    return [torch.linalg.vector_norm(tensor, norm_type, dtype=wide) for tensor in tensors]


def _group_device(groups: Sequence[ProcessGroup]) -> torch.device:
    """Return the device on which a rank without gradients takes part in the groups' collectives."""
    if groups and dist.get_backend(groups[0]) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
