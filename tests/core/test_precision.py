from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch

from booster_core.booster import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import Capability
from booster_core.plugin.settings import place_model
from booster_core.plugin.single import SingleDevicePlugin
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_core.precision.casting import cast_floating
from booster_testing.models import TinyMLP


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("suffix", ["", "-mixed"])
def test_policies_by_name(name, dtype, suffix):
    policy = PrecisionPolicy.parse(name + suffix)
    assert policy.compute_dtype == dtype
    assert policy.param_dtype == policy.master_dtype == policy.reduce_dtype == torch.float32
    assert policy.name == name
    assert (policy.loss_scale is not None) == (name == "fp16")


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: PrecisionPolicy.parse("fp23"), ConfigError, "Unknown precision 'fp23'. Use one of"),
        (lambda: PrecisionPolicy.parse(16), TypeError, "got `int`"),
        (lambda: PrecisionPolicy.parse("pure-bf16", loss_scale=LossScaleConfig()), ConfigError, "has none of it"),
        (lambda: PrecisionPolicy(compute_dtype=torch.int8), ConfigError, "compute_dtype"),
        (lambda: PrecisionPolicy(loss_scale=LossScaleConfig()), ConfigError, "is for fp16"),
        (lambda: Booster("cpu", "bf16", SingleDevicePlugin(precision="fp32")), ConfigError, "twice with two answers"),
        (
            lambda: Booster("cpu", PrecisionPolicy(param_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)),
            ConfigError,
            "no master weights",
        ),
    ],
)
def test_contradictions_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_pure_bf16_is_one_format():
    policy = PrecisionPolicy.parse("pure-bf16")
    assert policy.compute_dtype == policy.param_dtype == policy.master_dtype == torch.bfloat16
    assert policy.is_pure
    assert not policy.uses_autocast
    assert PrecisionPolicy.parse("fp32").is_pure
    assert not PrecisionPolicy.parse("bf16").is_pure


ASKED_NOTHING = PrecisionPolicy(param_dtype=None, follows_model=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_policy_that_follows_the_model_takes_the_format_of_what_is_trained(name, dtype):
    model = TinyMLP().to(dtype)
    policy = ASKED_NOTHING.for_model(model)
    assert replace(policy, follows_model=False) == PrecisionPolicy.parse(name)
    assert policy.for_model(model) is policy
    assert PrecisionPolicy.parse("fp32").for_model(model).compute_dtype == torch.float32, "it was asked for"
    model.requires_grad_(requires_grad=False)
    assert ASKED_NOTHING.for_model(model) is ASKED_NOTHING
    assert ASKED_NOTHING.for_model(TinyMLP().double()) is ASKED_NOTHING


def test_a_plugin_without_bf16_refuses_what_would_need_it():
    class OnlyWide(SingleDevicePlugin):
        name = "wide"
        capabilities = SingleDevicePlugin.capabilities - {Capability.BF16}

    model = TinyMLP().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"trained parameters are in bf16.*'wide' does not support precision 'bf16'"):
        Booster("cpu", plugin=OnlyWide()).boost(model, optimizer)
    with pytest.raises(ConfigError, match="'wide' does not support precision 'bf16'"):
        Booster("cpu", "pure-bf16", OnlyWide())
    Booster("cpu", "fp32", OnlyWide()).boost(model, optimizer)


def test_buffers_and_batch_normalization_are_no_part_of_a_narrow_policy():
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1), torch.nn.BatchNorm1d(2))
    model.register_buffer("table", torch.ones(2) / 3)
    boosted, *_ = Booster("cpu", "pure-bf16").boost(model)
    assert model[0].weight.dtype == torch.bfloat16
    assert {each.dtype for each in model[1].parameters()} == {model.table.dtype} == {torch.float32}
    assert boosted(torch.ones(2, 2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_casting_keeps_containers_and_other_objects():
    class Pair(NamedTuple):
        left: torch.Tensor
        right: object

    @dataclass
    class Record:
        values: list
        name: str = "x"

    other = object()
    half = torch.ones(2, dtype=torch.bfloat16)
    value = {"a": Pair(half, other), "b": [Record([half]), torch.ones(2, dtype=torch.int64)], "c": None}
    cast = cast_floating(value, torch.float32)
    assert isinstance(cast["a"], Pair)
    assert cast["a"].left.dtype == torch.float32
    assert cast["a"].right is other
    assert isinstance(cast["b"][0], Record)
    assert cast["b"][0].values[0].dtype == torch.float32
    assert cast["b"][1] is value["b"][1]
    assert half.dtype == torch.bfloat16
    assert value["a"].left is half


def test_casting_a_transformers_output():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = CausalLMOutputWithPast(logits=torch.ones(2, 3, dtype=torch.bfloat16))
    cast = cast_floating(output, torch.float32)
    assert isinstance(cast, CausalLMOutputWithPast)
    assert cast.logits.dtype == cast["logits"].dtype == torch.float32
    assert cast.loss is None


def test_a_low_precision_model_is_widened_for_mixed_precision_but_not_what_is_frozen():
    model = TinyMLP().bfloat16()
    model.first.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.second.parameters(), lr=0.1)
    parameter = model.second.weight
    place_model(model, optimizer, torch.device("cpu"), PrecisionPolicy.parse("bf16"))
    assert model.second.weight is parameter
    assert model.second.weight.dtype == torch.float32
    assert model.first.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("asked", "expected"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_parameters_stay_as_they_are_unless_a_format_is_asked(asked, expected):
    model = TinyMLP().bfloat16()
    Booster("cpu", asked).boost(model)
    assert model.first.weight.dtype == expected


def test_optimizer_state_follows_the_parameters_format():
    model = TinyMLP().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    booster = Booster("cpu", "fp32")
    boosted, stepped, *_ = booster.boost(model, optimizer)
    assert optimizer.state[model.first.weight]["exp_avg"].dtype == torch.float32
    stepped.zero_grad()
    booster.backward(boosted(torch.ones(1, 8)).sum(), stepped)
    stepped.step()
