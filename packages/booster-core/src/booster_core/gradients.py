"""Norms and clipping of gradients that may be spread over ranks, each element counted exactly once."""

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

__all__ = ["check_finite_norm", "clip_by_norm", "global_norm"]


_ROW = 1024
"""Elements whose squares are summed in fp32, which of so few is off by less than fp32 can hold."""
_TINY = 1e-15
"""Norms below this may consist of elements whose squares fp32 can't hold."""


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


def global_norm(
    gradients: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    groups: Sequence[ProcessGroup] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the norm of all gradients, over this rank and the given groups.

    The sum over elements is carried in fp64, on the CPU but for rows of 1,024: in fp32 it depends on how the elements
    are cut into tensors, and over tens of millions of them torch's kernel for CPUs is off by a part in two thousand.

    Args:
        gradients: The gradients, or parts of them, that are counted on this rank; any shapes. Over all ranks of the
            groups every element of the model must appear once: a replicated gradient is passed by one rank only, or
            its group is left out.
        norm_type: Order of the norm, positive; ``inf`` for the largest magnitude.
        groups: Process groups over which the elements are spread, as the axes of a mesh are; summed over one
            after the other.
        dtype: Format of the result; ``None`` means fp32, or fp64 where a gradient here has that. Give it where another
            rank may have one in fp64.
        device: Where the groups communicate and the result is; ``None`` for the first gradient's. Give it where a rank
            may have no gradients: all ranks must use one backend.

    Returns:
        A scalar tensor, the same on every rank of the groups: NaN where an element is.

    Collective: every rank of ``groups``, also a rank that has no gradients; none when ``groups`` is empty.
    """
    present = [gradient.detach() for gradient in gradients if gradient.numel()]
    present = [gradient.abs() if gradient.is_complex() else gradient for gradient in present]
    if device is None:
        device = present[0].device if present else torch.device("cpu")
    if dtype is None:
        dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in present) else torch.float32
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in present:
        by_device.setdefault(gradient.device, []).append(gradient)
    parts = [_norm(tensors, norm_type).to(device) for tensors in by_device.values()]
    total = (
        torch.linalg.vector_norm(torch.stack(parts), norm_type)
        if parts
        else torch.zeros((), dtype=torch.float64, device=device)
    )
    if not groups:
        return total.to(dtype)
    if math.isinf(norm_type):
        # A backend's largest of NaN and a number may be the number, so a flag for NaN travels with the magnitude.
        pair = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan().to(total.dtype)])
        for group in groups:
            dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
        return torch.where(pair[1] > 0, math.nan, pair[0]).to(dtype)
    total = total.pow_(norm_type)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.pow_(1.0 / norm_type).to(dtype)


def _norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm in fp64 of all elements of some tensors of one device."""
    if norm_type == 2.0 and tensors[0].device.type == "cpu":
        total = _norm_of_rows(tensors)
        # Else squares may have left the range of fp32, whose kernel takes a third of the time of that of fp64.
        if _TINY < float(total) < math.inf:
            return total
    parts = torch._foreach_norm(tensors, norm_type, torch.float64)  # noqa: SLF001 - what torch clips by
    exact: Tensor = torch.linalg.vector_norm(torch.stack(parts), norm_type)
    return exact


def _norm_of_rows(tensors: list[Tensor]) -> Tensor:
    """Return the norm in fp64 of tensors on the CPU, the sums of whose rows are fp32's."""
    found: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in tensors:
        num_whole = tensor.numel() // _ROW * _ROW
        if not num_whole or tensor.dtype == torch.float64 or not tensor.is_contiguous():
            others.append(tensor)
            continue
        flat = tensor.view(-1)
        rows = torch.linalg.vector_norm(flat[:num_whole].view(-1, _ROW), dim=-1, dtype=torch.float32)
        found.append(torch.linalg.vector_norm(rows, dtype=torch.float64))
        if num_whole < tensor.numel():
            others.append(flat[num_whole:])
    if others:
        rest = torch._foreach_norm(others, 2.0, torch.float64)  # noqa: SLF001 - as above
        found += rest
    total: Tensor = torch.linalg.vector_norm(torch.stack(found))
    return total


def check_finite_norm(norm: Tensor) -> None:
    """Raise where a global norm is not finite.

    Raises:
        GradientError: If the norm is infinite or NaN; the norm is the same on every rank, so all raise.
    """
    if not bool(norm.isfinite()):
        msg = (
            f"The global norm of the gradients is {float(norm)}, and `error_if_nonfinite=True` forbids that. "
            "Lower the learning rate, look for infinities in the batch, or pass `error_if_nonfinite=False`."
        )
        raise GradientError(msg)


def clip_by_norm(
    gradients: Sequence[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    counted: Sequence[Tensor] | None = None,
    groups: Sequence[ProcessGroup] = (),
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    Args:
        gradients: The gradients held on this rank, all of which are scaled.
        max_norm: Largest global norm; 0 or more. Infinity scales nothing, also where the norm is not finite.
        norm_type: Order of the norm; ``inf`` for the largest magnitude.
        counted: The part of ``gradients`` that this rank counts towards the norm; all by default. See `global_norm`.
        groups: Process groups over which the gradients are spread.
        device: Where these communicate; see `global_norm`.
        dtype: Format of the norm; see `global_norm`.
        error_if_nonfinite: Raise where the norm is infinite or NaN.

    Returns:
        The global norm before clipping, a scalar tensor, the same on every rank.

    Raises:
        ConfigError: If ``max_norm`` is negative or ``norm_type`` is not positive.
        GradientError: If the norm is not finite and ``error_if_nonfinite`` is set.

    Collective: every rank of ``groups``.
    Reference: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks" (arXiv:1211.5063).
    """
    check_norm_arguments(max_norm, norm_type)
    norm = global_norm(gradients if counted is None else counted, norm_type, groups=groups, dtype=dtype, device=device)
    if error_if_nonfinite:
        check_finite_norm(norm)
    if max_norm != math.inf:
        scale_by_norm(gradients, norm, max_norm)
    return norm


def scale_by_norm(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place by what brings a norm down to ``max_norm``."""
    # The same guard as torch's: clamping instead of branching keeps the device from having to be asked.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for place, held in _by_device(gradients).items():
        torch._foreach_mul_(held, factor.to(place))


def clip_by_value(gradients: Sequence[Tensor], clip_value: float) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]`` in place.

    Args:
        gradients: The gradients held on this rank.
        clip_value: Largest magnitude; 0 or more.

    Raises:
        ConfigError: If ``clip_value`` is negative or NaN.
    """
    if not clip_value >= 0:
        msg = f"`clip_value={clip_value}` must be 0 or more; it is the largest magnitude that a gradient keeps."
        raise ConfigError(msg)
    for held in _by_device(gradients).values():
        torch._foreach_clamp_min_(held, -clip_value)
        torch._foreach_clamp_max_(held, clip_value)


def _by_device(gradients: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(gradient.device, []).append(gradient)
    return found
