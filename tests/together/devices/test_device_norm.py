"""Norms and sums on devices: ranks with and without gradients use one backend, and kernels are few."""

import torch
import torch.distributed as dist
from simulated_device import NAME, on_devices
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.gradients import clip_by_norm
from booster_runtime import collectives


@on_devices(2, group_timeout_seconds=20.0)
def test_norms_and_fp16_averages_on_devices(simulated_device):
    gradients = [torch.tensor([3.0, 4.0], device=NAME)] if dist.get_rank() == 0 else []
    norm = clip_by_norm(gradients, 1.0, groups=[dist.group.WORLD], device=torch.device(NAME))
    assert norm.item() == 5.0
    for gradient in gradients:
        torch.testing.assert_close(gradient.cpu(), torch.tensor([0.6, 0.8]))
    source = torch.full((4,), 40000.0, device=NAME, dtype=torch.float16)
    out = torch.zeros(2, device=NAME, dtype=torch.float32)
    collectives.reduce_scatter(source, (0, 2, 4), out, scale=0.5).wait()
    assert out.tolist() == [40000.0, 40000.0]


@on_devices(1)
def test_one_rank_on_a_device_takes_its_gradient_in_one_kernel(simulated_device):
    """Sums in blocks that stay in a cache are for the CPU."""
    names = []

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
            names.extend([] if is_view or func.__name__.startswith("new_empty") else [func.__name__])
            return func(*args, **(kwargs or {}))

    source = torch.ones(1 << 18, device=NAME, dtype=torch.bfloat16)
    out = torch.zeros(1 << 18, device=NAME)
    with Kernels():
        collectives.reduce_scatter(source, (0, 1 << 18), out).wait()
    assert names == ["copy_.default"]
    assert out.sum().item() == float(1 << 18)
