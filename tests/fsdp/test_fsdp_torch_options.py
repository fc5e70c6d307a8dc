"""The options that are passed to torch, compared with ``fully_shard`` by hand: gradients, dtypes and placements."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, noise
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing.compare import assert_same_tensors, tolerance_for

BF16 = torch.bfloat16


def last_dimension(parameter):
    return Shard(parameter.ndim - 1)


FP32_OUTPUT = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32)
POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16, fp32 sums": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "bf16, fp32 output": MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32),
    "fp32, bf16 sums": MixedPrecisionPolicy(reduce_dtype=BF16),
    "fp32 output of all": FP32_OUTPUT,
}
CASES = {
    "placement": ({"shard_placement_fn": last_dimension}, {"shard_placement_fn": last_dimension}),
    "offload": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"cpu_offload": True}),
    **{name: ({"mp_policy": policy}, {"mixed_precision": policy}) for name, policy in POLICIES.items()},
    "policy and precision": (
        {"mp_policy": FP32_OUTPUT},
        {"mixed_precision": POLICIES["bf16, fp32 sums"], "precision": "bf16"},
    ),
}
"""Options of `fully_shard`, and of the plugin."""
WITHOUT_AUTOCAST = (
    "forward and backward in bfloat16 without autocast; parameters kept in float32 and gathered in bfloat16"
)


class Net(nn.Module):
    """Layers whose sizes two and four ranks divide; notes the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        self.dtype_of_input = x.dtype
        return self.last(torch.tanh(self.norm(self.first(x))))


def share():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))[dist.get_rank() :: dist.get_world_size()]


def outcome(net, model, backward, optimizer):
    """Return what a step leaves: gradients and parameters, whole and by name, dtypes, and placements."""
    output = model(share())
    inside = net.dtype_of_input
    backward(output.float().square().mean())
    gradients = {name: parameter.grad.full_tensor() for name, parameter in net.named_parameters()}
    dtypes = {parameter.grad.dtype for parameter in net.parameters()}
    optimizer.step()
    values = {name: parameter.full_tensor().detach() for name, parameter in net.named_parameters()}
    placements = {name: str(parameter.placements) for name, parameter in net.named_parameters()}
    return gradients, values, (output.dtype, inside, dtypes, placements)


def make():
    torch.manual_seed(0)
    return Net()


def boosted(**options):
    net = make()
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Linear"], **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    return *outcome(net, model, lambda loss: booster.backward(loss, optimizer), optimizer), booster.describe()


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_step_equals_fully_shard_by_hand(name):
    of_torch, of_plugin = CASES[name]
    gradients, values, found, described = boosted(**of_plugin)
    net, inner = make(), dict(of_torch)
    if "mp_policy" in inner:  # outputs are those of the model
        inner["mp_policy"] = dataclasses.replace(inner["mp_policy"], output_dtype=None)
    fully_shard(net.first, **inner)
    fully_shard(net.last, **inner)
    fully_shard(net, **of_torch)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    expected_gradients, expected, by_torch = outcome(net, net, lambda loss: loss.backward(), optimizer)
    assert found == by_torch
    # Both compute the same; sums of narrow dtypes may be in another order.
    tolerance = tolerance_for(BF16 if "bf16" in name else torch.float32)
    assert_same_tensors(gradients, expected_gradients, tolerance)
    assert_same_tensors(values, expected, tolerance)
    if of_torch.get("mp_policy") == FP32_OUTPUT:
        assert found[:3] == (torch.float32, BF16, {torch.float32})
        assert WITHOUT_AUTOCAST in described
        assert "reduction  gradients are sent in fp32" in described


@on_ranks(2)
def test_autocast_is_the_default():
    _, _, (output, inside, dtypes, _), described = boosted(precision="bf16")
    assert (output, inside, dtypes) == (torch.float32, torch.float32, {torch.float32})
    assert "forward and backward in bfloat16 by autocast" in described


@on_ranks(2)
def test_fp16_without_autocast_scales_the_loss():
    net = make()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    booster = Booster("cpu", plugin=TorchFSDPPlugin(mixed_precision=policy))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = optimizer.loss_scaler.scale
    booster.backward(model(share()).float().square().mean() * 1e6, optimizer)
    optimizer.step()
    assert optimizer.found_overflow
    assert optimizer.loss_scaler.scale == before / 2


# ---- whole parameters of other placements


@on_ranks(2)
def test_optimizer_of_whole_parameters_steps_columns():
    case = Case(
        build=lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False)),
        batch=noise(4, 8),
        optimizer=lambda model: torch.optim.Muon(model.parameters(), lr=0.1),
        max_norm=None,
    )
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"shard_placement_fn": last_dimension}))


# ---- user errors


@raises_on_ranks(ConfigError, "`mixed_precision` has `param_dtype=torch.float64`", 2)
def test_a_wide_policy_raises():
    plugin = TorchFSDPPlugin(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float64))
    Booster("cpu", plugin=plugin).boost(make())
