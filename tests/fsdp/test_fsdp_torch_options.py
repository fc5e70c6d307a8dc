"""The options that are passed to torch, compared with ``fully_shard`` by hand: gradients, dtypes and placements."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin, sharding
from booster_runtime import collectives
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for

BF16 = torch.bfloat16


def last_dimension(parameter):
    return Shard(parameter.ndim - 1)


# Options of the plugin, and of `fully_shard`.
CASES = {
    "placement": (lambda: {"shard_placement_fn": last_dimension}, {}),
    "bf16": (lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, {}),
    "bf16, fp32 sums": (lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)}, {}),
    "bf16, fp32 output": (
        lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)},
        {},
    ),
    "fp32, bf16 sums": (lambda: {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)}, {}),
    "offload": (lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
    "fp32 output of all": (
        lambda: {
            "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        },
        {},
    ),
    "policy and precision": (
        lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)},
        {"precision": "bf16"},
    ),
}


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


def by_hand(options):
    net = make()
    inner = dict(options)
    if "mp_policy" in options:  # outputs are those of the model
        inner["mp_policy"] = dataclasses.replace(options["mp_policy"], output_dtype=None)
    fully_shard(net.first, **inner)
    fully_shard(net.last, **inner)
    fully_shard(net, **options)
    return outcome(net, net, lambda loss: loss.backward(), torch.optim.AdamW(net.parameters(), lr=0.1))


def boosted(options, plugin_options):
    given = {**options, **plugin_options}
    if "mp_policy" in given:
        given["mixed_precision"] = given.pop("mp_policy")
    if "offload_policy" in given:
        given["cpu_offload"] = bool(given.pop("offload_policy"))
    net = make()
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Linear"], **given))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    return *outcome(net, model, lambda loss: booster.backward(loss, optimizer), optimizer), booster.describe()


def both(name):
    make_options, plugin_options = CASES[name]
    options = make_options()
    return boosted(options, plugin_options), by_hand(options)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"policy and precision"}))
def test_step_equals_fully_shard_by_hand(name):
    plain = make()
    for (gradients, values, found, _), (expected_gradients, expected, by_torch) in run_on_ranks(both, 2, name):
        assert found == by_torch
        # Both compute the same; sums of narrow dtypes may be in another order.
        narrow = torch.float32 in found[2] and "bf16" not in name
        tolerance = tolerance_for(torch.float32 if narrow else BF16)
        assert_same_tensors(gradients, expected_gradients, tolerance)
        assert_same_tensors(values, expected, tolerance)
        assert gradients.keys() == dict(plain.named_parameters()).keys()


# ---- bf16 without autocast


@pytest.mark.parametrize("name", ["fp32 output of all", "policy and precision"])
def test_narrow_forward_without_autocast_equals_fully_shard_by_hand(name):
    for (gradients, values, found, described), (expected_gradients, expected, _) in run_on_ranks(both, 2, name):
        output, inside, dtypes, _ = found
        assert (output, inside, dtypes) == (torch.float32, BF16, {torch.float32})
        tolerance = tolerance_for(BF16)
        assert_same_tensors(gradients, expected_gradients, tolerance)
        assert_same_tensors(values, expected, tolerance)
        assert (
            "forward and backward in bfloat16 without autocast; parameters kept in float32 and gathered in bfloat16"
            in described
        )
        assert "reduction  gradients are sent in fp32" in described


@on_ranks(2)
def test_autocast_is_the_default():
    _, _, (output, inside, dtypes, _), described = boosted({}, {"precision": "bf16"})
    assert (output, inside, dtypes) == (torch.float32, torch.float32, {torch.float32})
    assert "forward and backward in bfloat16 by autocast" in described


def sent(name):
    """Return the dtypes that reductions of a step send, and what `Booster.describe` says."""
    dtypes = set()
    original = collectives.reduce_scatter

    def noting(tensor, *args, **kwargs):
        dtypes.add(tensor.dtype)
        return original(tensor, *args, **kwargs)

    make_options, plugin_options = CASES[name]
    with mock.patch.object(collectives, "reduce_scatter", noting):
        *_, described = boosted(make_options(), plugin_options)
    return dtypes, described


def test_describe_says_what_the_policy_of_torch_brings():
    for dtypes, described in run_on_ranks(sent, 2, "bf16"):
        assert "compute bf16" in described
        assert "forward and backward in bfloat16 without autocast; parameters kept in float32" in described
        # torch 2.15 reduces in the dtype of the parameters by default, and before in that of the gathered ones.
        [dtype] = dtypes
        name = {BF16: "bf16, summed in fp32", torch.float32: "fp32"}[dtype]
        assert f"reduction  gradients are sent in {name}" in described
    for name, dtype in (
        ("bf16, fp32 sums", torch.float32),
        ("fp32, bf16 sums", BF16),
        ("fp32 output of all", torch.float32),
    ):
        assert {frozenset(dtypes) for dtypes, _ in run_on_ranks(sent, 2, name)} == {frozenset({dtype})}
    for (*_, described), _ in run_on_ranks(both, 2, "fp32, bf16 sums"):
        assert "forward and backward in the dtype of the parameters, kept in float32" in described


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


# ---- what reaches torch


def offloading(options):
    policies = []
    original = sharding.fully_shard

    def noting(*args, **kwargs):
        policies.append(kwargs["offload_policy"])
        return original(*args, **kwargs)

    sharding.fully_shard = noting
    try:
        Booster("cpu", plugin=TorchFSDPPlugin(**options)).boost(make())
    finally:
        sharding.fully_shard = original
    return policies


def test_offloading_reaches_torch():
    policy = CPUOffloadPolicy(pin_memory=False)
    assert run_on_ranks(offloading, 2, {"cpu_offload": True, "unit_classes": ["Linear"]}) == [[policy] * 3] * 2
    assert run_on_ranks(offloading, 2, {}) == [[OffloadPolicy()]] * 2


# ---- whole parameters of other placements


def muon_steps(options, is_boosted):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
    optimizer = torch.optim.Muon(net.parameters(), lr=0.1)
    model, backward = net, lambda loss: loss.backward()
    if is_boosted:
        booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
        model, optimizer, *_ = booster.boost(net, optimizer)
        backward = optimizer.backward
    for step in range(2):
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        backward(model(data).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for name, p in net.named_parameters()
    }


def test_optimizer_of_whole_parameters_steps_columns():
    expected = muon_steps({}, is_boosted=False)
    for values in run_on_ranks(muon_steps, 2, {"shard_placement_fn": last_dimension}, True):
        assert_same_tensors(values, expected, tolerance_for(torch.float32))


# ---- user errors


def boost_with(options, mixed_precision=None):
    Booster("cpu", mixed_precision, TorchFSDPPlugin(**options)).boost(make())


@pytest.mark.parametrize(
    ("options", "mixed_precision", "message"),
    [
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
            "bf16",
            r"`mixed_precision` has reduce_dtype torch.bfloat16, and the precision 'bf16' asks for torch.float32",
        ),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.float64)},
            None,
            "`mixed_precision` has `param_dtype=torch.float64`",
        ),
    ],
)
def test_options_that_contradict_each_other_raise(options, mixed_precision, message):
    expect_on_ranks(ConfigError, message, boost_with, 2, options, mixed_precision)
