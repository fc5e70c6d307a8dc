"""The global norm on devices: ranks with and without gradients communicate over one backend."""

import torch
import torch.distributed as dist
from simulated_device import NAME, run_on_devices

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
