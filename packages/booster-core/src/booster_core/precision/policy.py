"""`PrecisionPolicy`: a run's number formats, given by name or as an object.

A policy says what a format is used for; how a strategy brings that about (autocast over fp32 parameters, or working
parameters next to fp32 masters) is up to the plugin; see ``Plugin.resolve_precision``. Where no precision is asked for,
it follows from the model of each `Booster.boost`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from booster_core.errors import ConfigError
from booster_core.precision.loss_scaler import LossScaleConfig

if TYPE_CHECKING:
    from torch import nn

NARROW = (torch.bfloat16, torch.float16)
"""Formats with fewer bits than fp32 in which models are trained."""

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_PURE = "pure-bf16"


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Numeric formats of a run.

    Args:
        compute_dtype: Format of matrix products and activations in forward and backward.
        param_dtype: Format of the parameters that forward reads, to which `Booster.boost` brings them; ``None`` leaves
            each parameter as it is.
        reduce_dtype: Format in which gradients are summed over ranks.
        master_dtype: Format of the parameters that the optimizer updates.
        save_dtype: Format in which ``save_model`` writes floating tensors; ``None`` as `export_dtype` says.
        output_dtype: Format to which floating outputs of the model's forward are cast; ``None`` leaves them.
        loss_scale: Dynamic loss scaling; by default on exactly where compute is in fp16, and ``None`` elsewhere.
        follows_model: Take the formats from each model that is boosted with an optimizer, as `for_model` does, and
            leave parameters in fp64 as they are: what a run that asks for no precision has.

    Raises:
        ConfigError: If a dtype is not a floating one, or loss scaling is asked for without fp16.
    """

    compute_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    save_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = torch.float32
    loss_scale: LossScaleConfig | None = None
    follows_model: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (
                field.name.endswith("_dtype")
                and value is not None
                and not (isinstance(value, torch.dtype) and value.is_floating_point)
            ):
                msg = f"`{field.name}={value!r}` is not a floating dtype such as torch.bfloat16."
                raise ConfigError(msg)
        if self.compute_dtype == torch.float16 and self.loss_scale is None:
            object.__setattr__(self, "loss_scale", LossScaleConfig())
        if self.compute_dtype != torch.float16 and self.loss_scale is not None:
            msg = (
                f"`loss_scale` is for fp16, whose range is too small for gradients; compute here is in {self.name}. "
                "Leave `loss_scale` out, or use precision 'fp16'."
            )
            raise ConfigError(msg)

    @property
    def name(self) -> str:
        """Short name of the compute format: ``fp32``, ``bf16``, ``fp16``."""
        return dtype_name(self.compute_dtype)

    @property
    def is_pure(self) -> bool:
        """Whether parameters, updates, compute and outputs are in one format: the model runs as it is, in that."""
        return self.compute_dtype == self.param_dtype == self.master_dtype == (self.output_dtype or self.compute_dtype)

    @property
    def uses_autocast(self) -> bool:
        """Whether forward runs under autocast: compute is in bf16 or fp16, and not everything is."""
        return self.param_dtype is not None and self.compute_dtype in NARROW and not self.is_pure

    def for_model(self, model: nn.Module) -> PrecisionPolicy:
        """Return the policy for training a model: `follows_model` takes bf16 or fp16 from its trained parameters.

        A step of a usual learning rate is smaller than the distance of two numbers in bf16 and is lost, so narrow
        parameters get the policy ``"bf16"`` (``"fp16"``), as if it were asked for: updates are in fp32, and compute is
        in the narrow format. Frozen parameters change nothing, and those in fp64 stay as they are.

        Args:
            model: The user's model, whose values may be missing yet.

        Returns:
            The policy ``"bf16"`` or ``"fp16"``, where the model has trained parameters of that format; else the same.
        """
        if not self.follows_model or self.param_dtype is not None:
            return self
        trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        narrow = next((dtype for dtype in NARROW if dtype in trained), None)
        if narrow is None:
            return self
        # A policy of torch's that a plugin was given may have chosen what forward computes in.
        compute = self.compute_dtype if self.compute_dtype in NARROW else narrow
        return replace(self, compute_dtype=compute, param_dtype=torch.float32)

    def export_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the format in which ``save_model`` writes a tensor, the same under every plugin.

        It is ``save_dtype``, where that is given. A run whose compute and updates have one format (``"fp32"``) writes
        that, to which `Booster.boost` has brought the model. Any other run, as under ``"bf16"``, writes what the model
        came in, from masters where there are any, but nothing wider than what the optimizer updates.

        Args:
            dtype: Format in which the tensor was passed to `Booster.boost`.
        """
        if not dtype.is_floating_point:
            return dtype
        if self.save_dtype is not None:
            return self.save_dtype
        if self.param_dtype is None:
            return dtype
        is_mixed = self.compute_dtype != self.master_dtype
        return dtype if is_mixed and dtype.itemsize <= self.master_dtype.itemsize else self.master_dtype

    @classmethod
    def parse(cls, value: PrecisionPolicy | str, *, loss_scale: LossScaleConfig | None = None) -> PrecisionPolicy:
        """Return the policy that a name stands for, or the policy itself.

        ``"bf16"`` and ``"bf16-mixed"`` are the same: parameters and sums stay in fp32, products are in bf16.
        ``"pure-bf16"`` has parameters, gradients and optimizer state in bf16, without fp32 masters, and runs the model
        without autocast.

        Args:
            value: ``"fp32"``, ``"bf16"``, ``"fp16"``, one of these with ``-mixed``, ``"pure-bf16"``, or a policy.
            loss_scale: Loss scaling to use with a policy given by name.

        Raises:
            ConfigError: If the name is unknown, or ``loss_scale`` comes next to a policy object.
            TypeError: If ``value`` is neither a name nor a policy.
        """
        if isinstance(value, PrecisionPolicy):
            if loss_scale is not None and loss_scale != value.loss_scale:
                msg = "`loss_scale` was given twice: next to the policy, and inside it. Give it in one place."
                raise ConfigError(msg)
            return value
        if not isinstance(value, str):
            msg = f"A precision is a name such as 'bf16' or a PrecisionPolicy; got `{type(value).__name__}`."
            raise TypeError(msg)
        if value == _PURE:
            if loss_scale is not None:
                msg = f"`loss_scale` is for fp16, and precision '{_PURE}' has none of it. Leave `loss_scale` out."
                raise ConfigError(msg)
            narrow = torch.bfloat16
            return cls(compute_dtype=narrow, param_dtype=narrow, master_dtype=narrow, output_dtype=None)
        by_name = {name: dtype for dtype, name in _NAMES.items() if dtype != torch.float64}
        dtype = by_name.get(value.removesuffix("-mixed"))
        if dtype is None:
            msg = f"Unknown precision '{value}'. Use one of 'fp32', 'bf16', 'fp16', '{_PURE}', or a PrecisionPolicy."
            raise ConfigError(msg)
        return cls(compute_dtype=dtype, loss_scale=loss_scale)

    def describe(self) -> dict[str, str]:
        """Return the formats by short name, as `Booster.describe` prints them."""
        kept = {
            field.name.removesuffix("_dtype"): getattr(self, field.name)
            for field in fields(self)
            if field.name.endswith("_dtype")
        }
        return {name: "unchanged" if dtype is None else dtype_name(dtype) for name, dtype in kept.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a format, such as ``"bf16"``."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
