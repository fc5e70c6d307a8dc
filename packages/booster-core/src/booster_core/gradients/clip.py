"""Clipping gradients by their global norm or by value, on top of `booster_core.gradients.norm`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError
from booster_core.gradients.norm import check_finite_norm, check_norm_arguments, global_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


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
