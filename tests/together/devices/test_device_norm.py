"""Norms and sums on devices: ranks with and without gradients use one backend, and kernels are few."""

import torch
import torch.distributed as dist
from simulated_device import NAME, run_on_devices
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.gradients import clip_by_norm
from booster_runtime import collectives


def _norm_of_the_first_rank():
    gradients = [torch.tensor([3.0, 4.0], device=NAME)] if dist.get_rank() == 0 else []
    norm = clip_by_norm(gradients, 1.0, groups=[dist.group.WORLD], device=torch.device(NAME))
    return norm.item(), [gradient.tolist() for gradient in gradients]


def _average_of_large_fp16():
    source = torch.full((4,), 40000.0, device=NAME, dtype=torch.float16)
    out = torch.zeros(2, device=NAME, dtype=torch.float32)
    collectives.reduce_scatter(source, (0, 2, 4), out, scale=0.5).wait()
    return out.tolist()


def _on_each_rank():
    return _norm_of_the_first_rank(), _average_of_large_fp16()


def test_norms_and_fp16_averages_on_devices(simulated_device):
    (first, average), (second, _) = run_on_devices(_on_each_rank, 2, simulated_device, group_timeout_seconds=20.0)
    assert first[0] == second[0] == 5.0
    torch.testing.assert_close(torch.tensor(first[1]), torch.tensor([[0.6, 0.8]]))
    assert average == [40000.0, 40000.0]


class _Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        self.names += [] if is_view or func.__name__.startswith("new_empty") else [func.__name__]
        return result


def _kernels_of_a_sum():
    source = torch.ones(1 << 18, device=NAME, dtype=torch.bfloat16)
    out = torch.zeros(1 << 18, device=NAME)
    with _Kernels() as found:
        collectives.reduce_scatter(source, (0, 1 << 18), out).wait()
    return found.names, out.sum().item()


def test_one_rank_on_a_device_takes_its_gradient_in_one_kernel(simulated_device):
    """Sums in blocks that stay in a cache are for the CPU."""
    assert run_on_devices(_kernels_of_a_sum, 1, simulated_device) == [(["copy_.default"], float(1 << 18))]
