"""State and step on the host, or on a disk by Gemini: the same bits as without."""

import torch
import torch.distributed as dist
from matrix import matrix
from own_optimizers import CountsByGroup
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
    "other": CountsByGroup,
}


def train(plugin, name, precision):
    """Train five steps; return the boosted model."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    booster = Booster("cpu", precision, plugin)
    model, optimizer, *_ = booster.boost(net, OPTIMIZERS[name](list(net.parameters())))
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 16, generator=generator)
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(options, name, precision):
    model = train(LowLevelZeroPlugin(bucket_bytes=2048, **options), name, precision)
    return {key: value.clone() for key, value in model.state_dict().items()}


@matrix(1, precision=["fp32", "bf16", "fp16"])
def test_offload_changes_no_bit_under_any_precision(precision):
    plain, offloaded = (run_on_ranks(trained, 2, each, "fused", precision)[0] for each in ({}, {"offload": "cpu"}))
    assert all(torch.equal(plain[name], tensor) for name, tensor in offloaded.items())


def trained_on_a_disk(folder, name, precision):
    """Train as `trained` does, by what the error about ``offload="disk"`` advises."""
    plugin = GeminiPlugin(min_chunk_bytes=2048, shard_param_frac=0.0, offload_optim_frac=1.0, offload_dir=folder)
    model = train(plugin, name, precision)
    memory = model.gatherer.memory
    found, on_disk = model.state_dict(), memory.store._end
    memory.close()
    return found, on_disk


@matrix(["sgd-bf16"], name=list(OPTIMIZERS), precision=["fp32", "bf16"])
def test_gemini_on_a_disk_has_the_bits_of_stage_2(name, precision, tmp_path):
    expected = run_on_ranks(trained, 2, {"stage": 2}, name, precision)[0]
    for found, on_disk in run_on_ranks(trained_on_a_disk, 2, str(tmp_path), name, precision):
        assert all(torch.equal(expected[key], tensor) for key, tensor in found.items())
        assert on_disk > 0 or (name == "adafactor" and precision == "fp32")  # its rows and columns stay in memory
    assert list(tmp_path.iterdir()) == [], "files have no name"
