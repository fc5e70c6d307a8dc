"""BatchNorm whose statistics are those of the global batch, on any device.

torch's ``SyncBatchNorm`` needs CUDA. Where the input is elsewhere, `AnyDeviceSyncBatchNorm` computes the same from two
all-reduces, so that a script that asks for it can be debugged on a CPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional as differentiable


class AnyDeviceSyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` that also runs off CUDA.

    Collective: every rank of the process group, in each forward and backward while training.
    Reference: Ioffe and Szegedy 2015, "Batch Normalization" (arXiv:1502.03167), with statistics over all ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, shape ``(N, C, ...)``, by the mean and variance over all ranks' N and trailing dims."""
        uses_batch = self.training or self.running_mean is None
        if x.device.type == "cuda" or not uses_batch:
            return super().forward(x) if x.device.type == "cuda" else self._normalise_by_running(x)
        self._check_input_dim(x)
        self._check_non_zero_input_channels(x)
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *(1 for _ in range(2, x.dim()))]
        wide = x if x.dtype == torch.float64 else x.float()
        count = torch.tensor([x.numel() / x.shape[1]], dtype=wide.dtype, device=x.device)
        sums = self._all_reduce(torch.cat([wide.sum(dims), count]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - mean.view(shape)
        # The second reduction is of centred squares: E[x^2] - E[x]^2 would cancel for large means.
        variance = self._all_reduce(centred.square().sum(dims)) / count
        self._update_running(mean.detach(), (variance * count / (count - 1).clamp(min=1)).detach())
        normed = (centred * torch.rsqrt(variance + self.eps).view(shape)).to(x.dtype)
        return normed if self.weight is None else normed * self.weight.view(shape) + self.bias.view(shape)

    def _all_reduce(self, value: Tensor) -> Tensor:
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        reduced: Tensor = differentiable.all_reduce(value, group=group)  # type: ignore[no-untyped-call]
        return reduced

    def _normalise_by_running(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def _update_running(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), momentum)


def convert_sync_batchnorm(model: nn.Module) -> None:
    """Let every BatchNorm layer inside a model take its statistics from all ranks, in place.

    Parameters and buffers stay the same objects, so an optimizer made before keeps its hold on them.

    Args:
        model: The user's model; its BatchNorm layers change class.

    Collective: none.
    """
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for parent in [converted, *converted.modules()]:
        for name, child in parent.named_children():
            if type(child) is nn.SyncBatchNorm:
                setattr(parent, name, _any_device(child))


def _any_device(layer: nn.SyncBatchNorm) -> AnyDeviceSyncBatchNorm:
    """Return the layer's twin that also runs off CUDA, holding the same parameters and buffers."""
    twin = AnyDeviceSyncBatchNorm.__new__(AnyDeviceSyncBatchNorm)
    twin.__dict__ = layer.__dict__
    return twin
