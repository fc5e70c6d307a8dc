"""Dynamic loss scaling for fp16, and its default settings.

fp16 gradients below 6e-8 vanish, so the loss is multiplied before backward and gradients are divided before the step.
The scale falls when a gradient overflows (that step is skipped) and rises after a run of good steps
(Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Settings of dynamic loss scaling; the defaults are those of ``torch.amp.GradScaler``.

    Args:
        initial_scale: Scale of the first step.
        growth_factor: Multiplies the scale after ``growth_interval`` good steps; 1 keeps it.
        backoff_factor: Multiplies the scale after an overflow; below 1.
        growth_interval: Number of good steps in a row before the scale grows.
        min_scale: The scale never falls below this.
        max_scale: The scale never rises above this.

    Raises:
        ConfigError: If a value is out of range.
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale:
            msg = (
                "Loss scaling needs 0 < min_scale <= initial_scale <= max_scale; got "
                f"min_scale={self.min_scale}, initial_scale={self.initial_scale}, max_scale={self.max_scale}."
            )
            raise ConfigError(msg)
        if self.growth_factor < 1.0:
            msg = f"`growth_factor={self.growth_factor}` would shrink the loss scale. Use 1.0 or more."
            raise ConfigError(msg)
        if not 0.0 < self.backoff_factor < 1.0:
            msg = f"`backoff_factor={self.backoff_factor}` must be between 0 and 1, both excluded."
            raise ConfigError(msg)
        if self.growth_interval < 1:
            msg = f"`growth_interval={self.growth_interval}` counts steps and must be at least 1."
            raise ConfigError(msg)


class DynamicLossScaler:
    """The loss scale of one optimizer, and the rule by which it changes.

    The scale is a Python float that every rank updates from the same flag, so it stays equal on all ranks without
    communication of its own.

    Args:
        config: Settings of the scale.
    """

    def __init__(self, config: LossScaleConfig | None = None) -> None:
        self.config = config or LossScaleConfig()
        self.scale = self.config.initial_scale
        self.num_good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Change the scale after a step.

        Args:
            overflow: Whether a gradient of this step was infinite or NaN on any rank.

        Collective: none; ranks that pass equal flags keep equal scales.
        """
        if overflow:
            self.scale = max(self.scale * self.config.backoff_factor, self.config.min_scale)
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps >= self.config.growth_interval:
            self.scale = min(self.scale * self.config.growth_factor, self.config.max_scale)
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the number of good steps since it last changed."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore what `state_dict` returned."""
        self.scale = float(state["scale"])
        self.num_good_steps = int(state["num_good_steps"])


def unscale(gradients: Iterable[Tensor], scale: float) -> list[Tensor]:
    """Divide gradients by a loss scale in place, and look for those that overflowed, without waiting for a device.

    Args:
        gradients: Dense tensors of any shapes, formats and devices.
        scale: The loss scale.

    Returns:
        Flags for `any_raised`, one for each device and format: shape ``(1,)``, not zero where some element is infinite
        or NaN.

    Collective: none; a sharded strategy combines the flags of its ranks.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        alike.setdefault((real.device, real.dtype), []).append(real)
    flags = []
    for (device, _), held in alike.items():
        flag, inverse = torch.zeros(1, device=device), torch.full((1,), 1 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(held, flag, inverse)
        flags.append(flag)
    return flags


def any_raised(flags: Iterable[Tensor]) -> bool:
    """Return whether a flag of `unscale` is not zero; the host waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        by_device.setdefault(flag.device, []).append(flag)
    return any(bool(torch.cat(held).any()) for held in by_device.values())
