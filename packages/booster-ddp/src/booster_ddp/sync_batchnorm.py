"""BatchNorm with the statistics of the global batch, on any device.

torch's ``SyncBatchNorm`` needs CUDA. On other devices, `GlobalBatchNorm` computes the same with two all-reduces, so
that a script with ``sync_batchnorm=True`` can be debugged on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; the gradient of each rank's summand is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class GlobalBatchNorm(_BatchNorm):
    """Normalize over the samples of all ranks, on devices that torch's ``SyncBatchNorm`` does not support.

    Collective: every rank of the world, in each forward and backward while training.
    Reference: Ioffe and Szegedy 2015, "Batch Normalization" (arXiv:1502.03167), with statistics over all ranks.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            msg = f"BatchNorm needs an input of shape (N, C, ...); got {tuple(x.shape)}."
            raise ValueError(msg)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, shape ``(N, C, ...)``, by the mean and variance over all ranks' N and trailing dims."""
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        self._check_input_dim(x)
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *(1 for _ in range(2, x.dim()))]
        wide = x if x.dtype == torch.float64 else x.float()
        own_count = torch.tensor([x.numel() / x.shape[1]], dtype=wide.dtype, device=x.device)
        sums = _sum_over_ranks(torch.cat([wide.sum(dims), own_count]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - mean.view(shape)
        # The second sum is of centred squares: E[x^2] - E[x]^2 would cancel for large means.
        variance = _sum_over_ranks(centred.square().sum(dims)) / count
        if self.training:
            self._update_running(mean.detach(), (variance * count / (count - 1).clamp(min=1)).detach())
        normed = (centred * torch.rsqrt(variance + self.eps).view(shape)).to(x.dtype)
        return normed * self.weight.view(shape) + self.bias.view(shape) if self.affine else normed

    def _update_running(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), momentum)


def convert_sync_batchnorm(model: nn.Module, device_type: str) -> None:
    """Replace the BatchNorm layers inside a model, in place, by ones that use the statistics of all ranks.

    Parameters and buffers stay the same objects, so an optimizer that lists them remains valid.

    Args:
        model: The user's model; its BatchNorm layers are replaced.
        device_type: Where the model runs; torch's own layer is used on ``"cuda"``.

    Raises:
        ConfigError: If the model itself is a BatchNorm layer, or a layer's class overrides ``forward``, which the
            replacement would not run.
    """
    if isinstance(model, _BatchNorm):
        msg = (
            f"`sync_batchnorm=True` replaces layers inside a model, but the model is a `{type(model).__name__}` itself."
        )
        raise ConfigError(msg)
    replaced = {name: child for name, child in model.named_modules() if isinstance(child, _BatchNorm)}
    special = [f"'{name}' ({type(child).__name__})" for name, child in replaced.items() if _has_own_forward(child)]
    if special:
        msg = (
            f"`sync_batchnorm=True` would drop the forward of {len(special)} BatchNorm layer(s) whose class defines "
            f"one: {', '.join(special[:10])}. Leave the option out and convert them before `boost` by a function that "
            "knows their class, such as `timm.layers.convert_sync_batchnorm`."
        )
        raise ConfigError(msg)
    if device_type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and not isinstance(child, GlobalBatchNorm):
                twin = GlobalBatchNorm.__new__(GlobalBatchNorm)
                twin.__dict__ = child.__dict__
                setattr(parent, name, twin)


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether a layer's class, or the layer itself, overrides the forward of BatchNorm."""
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward, GlobalBatchNorm.forward)
    return type(module).forward not in known or "forward" in vars(module)


def _sum_over_ranks(value: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(value, dist.group.WORLD)  # type: ignore[no-untyped-call]
    return total
