"""What `Booster.describe` says of sums of gradients, against gradients whose sums tell the formats apart."""

from functools import partial

import torch
import torch.distributed as dist
from ranked import on_ranks
from simulated_device import NAME, on_devices
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from booster_core import Booster
from booster_core.precision import PrecisionPolicy
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": partial(TorchDDPPlugin, find_unused_parameters=False),
    "ddp, first step": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": LowLevelZeroPlugin,
    "zero, fp32 sent": partial(LowLevelZeroPlugin, stage=2, communication_dtype="fp32"),
    "gemini": GeminiPlugin,
    "hybrid": HybridParallelPlugin,
    "hybrid, zero": partial(HybridParallelPlugin, zero_stage=1),
}
SMALL = 2.0**-9
"""Is lost where it is added to 1 in bf16, and kept in fp32."""


def described_and_averaged(name, device, precision, **options):
    """Return what `describe` says of the sum of two ranks' gradients, 1 and `SMALL`, and their average."""
    model = nn.Linear(1, 16, bias=False)
    booster = Booster(device, precision, PLUGINS[name](**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.tensor([[1.0 if dist.get_rank() == 0 else SMALL]], device=device)
    booster.backward(model(x).float().sum(), optimizer)
    average = full_gradient(booster, model, "weight").float().cpu()
    told = [line for line in booster.describe().splitlines() if line.startswith(("precision", "reduction"))]
    lines = [line for line in told if "reduc" in line]
    return lines, average[0].item()


def formats_of_sums(device, backend, narrow_too):
    """Return in which format gradients are summed, by plugin and precision; it is what `describe` says, and true."""
    narrow = PrecisionPolicy(compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    found = {(name, "bf16"): described_and_averaged(name, device, "bf16") for name in PLUGINS}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    found["fsdp", "torch's policy"] = described_and_averaged("fsdp", device, None, mixed_precision=policy)
    found |= {(name, "narrow"): described_and_averaged(name, device, narrow) for name in narrow_too}
    formats = {}
    for key, (lines, average) in found.items():
        (line,) = lines
        assert line.startswith("reduction  gradients are sent in "), line
        assert ("in rank order" in line) != (f"by {backend}" in line), line
        formats[key] = line.partition("summed in ")[2][:4]
        is_exact = formats[key] == "fp32" and "rounded" not in line
        assert average == ((1 + SMALL) / 2 if is_exact else 0.5), (key, line)
    return formats


@on_devices(2, timeout_seconds=240.0)
def test_the_described_sum_is_the_one_on_devices(simulated_device):
    formats = formats_of_sums(NAME, "simccl", ["fsdp"])
    assert formats["zero", "bf16"] == formats["gemini", "bf16"] == formats["hybrid", "bf16"] == "bf16"
    assert formats["ddp", "bf16"] == formats["fsdp", "bf16"] == formats["zero, fp32 sent", "bf16"] == "fp32"
    assert formats["fsdp", "narrow"] == "bf16"


@on_ranks(2, timeout_seconds=240.0)
def test_the_described_sum_is_the_one_on_the_cpu():
    formats = formats_of_sums("cpu", "gloo", ["ddp", "ddp, first step", "fsdp"])
    narrow = {key for key, format_ in formats.items() if format_ != "fp32"}
    assert narrow == {("ddp", "narrow"), ("ddp, first step", "narrow")}
