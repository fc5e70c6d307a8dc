"""FSDP compared with one process on various models, by parameter name; evaluation, generation and loading."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from driven_runs import assert_same_loop
from matrix import matrix
from torch import nn

from booster_core import Booster, PrecisionPolicy
from booster_core.errors import ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import full_gradient
from booster_runtime.sharding.dtensor import local_of
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import Tolerance
from booster_testing.models import TinyMixedBag, TinyMLP, tiny_llama
from booster_testing.training import whole_model


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False))


def tiny_albert():
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return AlbertForMaskedLM(AlbertConfig(vocab_size=64, num_hidden_layers=3, **sizes, **dropouts))


def tiny_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_ff": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False))


class ConvNet(nn.Module):
    """Convolutions with GroupNorm, a layer in another memory format, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 10, 3), nn.GroupNorm(2, 10), nn.ReLU(), nn.Conv2d(10, 7, 3))
        self.body.to(memory_format=torch.channels_last)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 5)

    def forward(self, pixels):
        return self.head(self.body(pixels).mean((2, 3))) * self.temperature


MODELS = {
    "llama": tiny_llama,
    "tied llama": lambda: tiny_llama(tie_word_embeddings=True),
    "gpt2": tiny_gpt2,
    "albert": tiny_albert,
    "t5": tiny_t5,
    "conv": ConvNet,
}
OPTIONS = {
    "layers": {},
    "small units": {"unit_min_numel": 500},
    "keep gathered": {"reshard_after_forward": False},
    "prefetch": {"unit_min_numel": 500, "forward_prefetch": 2, "backward_prefetch": 2},
    "replicas": {"replica_size": 2},
    "to pairs": {"reshard_after_forward": 2},
    "ignored": {"ignored_modules": ["Linear"]},
    "offload": {"cpu_offload": True},
}


def make(name):
    torch.manual_seed(5)
    return MODELS[name]()


def loss_of(model, name, rank, world_size):
    """Return the mean loss over this rank's part of four samples."""
    generator = torch.Generator().manual_seed(0)
    if name == "conv":
        pixels = torch.randn(4, 3, 8, 8, generator=generator)[rank::world_size]
        return model(pixels).square().mean()
    tokens = torch.randint(1, 64, (4, 8), generator=generator)[rank::world_size].contiguous()
    inputs = {"input_ids": tokens, "labels": tokens}
    return model(**inputs).loss


def samples_of(name, _step, replica):
    """Return four samples of a replica."""
    generator = torch.Generator().manual_seed(replica)
    if name == "conv":
        return torch.randn(4, 3, 8, 8, generator=generator)
    tokens = torch.randint(1, 64, (4, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def assert_parity(name, options, num_ranks):
    # Attention does not depend on the bias of its keys.
    case = Case(
        build=partial(make, name), batch=partial(samples_of, name), steps=1, max_norm=0.1, no_effect=("*.key.bias",)
    )
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, options, num_ranks))


@matrix(["conv-small units"], name=MODELS, options=["layers", "small units"])
def test_gradients_norm_and_step_equal_one_process(name, options):
    assert_parity(name, OPTIONS[options], 2)


@matrix(["ignored"], options=sorted(OPTIONS.keys() - {"layers", "small units"}))
def test_gradients_with_each_option_equal_one_process(options):
    assert_parity("tied llama", OPTIONS[options], 4)


def memory_kept(name, options):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
    model = make(name)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    coordinator = DistCoordinator()
    booster.backward(loss_of(model, name, coordinator.rank, coordinator.world_size), optimizer)
    optimizer.step()
    kept = sum(local_of(parameter).numel() for parameter in model.parameters())
    state = sum(local_of(tensor).numel() for s in optimizer.state.values() for tensor in s.values() if tensor.dim())
    return kept, state, sum(parameter.numel() for parameter in model.parameters())


def test_parameters_and_state_are_sharded():
    for kept, state, whole in run_on_ranks(memory_kept, 4, "llama", {}):
        assert kept == pytest.approx(whole / 4, rel=0.05)
        assert state == pytest.approx(2 * whole / 4, rel=0.05)


# ---- different use on different ranks, and mixed dtypes


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, goes_left):
        x = self.common(x)
        return self.left(x) * self.scale if goes_left else self.right(x)


def on_one_side(_number, replica):
    return torch.ones(2, 4), replica == 0


def decaying(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def test_parameter_unused_on_some_ranks_has_zero_gradient_there():
    """And none where no rank uses it, so that no weight decays."""
    assert_equals_one_process(Case(build=Branches, batch=on_one_side, optimizer=decaying), Setting(TorchFSDPPlugin))


def frozen_in_double():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[0].requires_grad_(False)
    return model


def all_listed(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def thaws(run):
    for step in range(3):
        run.net[0].requires_grad_(step > 0)
        run.backward(run.loss(step))
        run.step()


def doubles(number, replica):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + replica), dtype=torch.float64)


def test_gradients_of_a_unit_that_was_frozen_at_boost_keep_their_precision():
    tolerance = Tolerance(relative=1e-12, reason="sums of fp64 in another order")
    case = Case(build=frozen_in_double, batch=doubles, optimizer=all_listed, tolerance=tolerance)
    assert_same_loop(thaws, case, Setting(TorchFSDPPlugin, {"unit_min_numel": 1}))


class MixedFormats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.first(x.to(torch.bfloat16)).float())


def mixed_formats():
    booster = Booster("cpu", PrecisionPolicy(param_dtype=None), TorchFSDPPlugin())
    torch.manual_seed(0)
    model = MixedFormats()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    formats = {name: parameter.dtype for name, parameter in model.unwrap().named_parameters()}
    rank = DistCoordinator().rank
    data = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    booster.backward(model(data[rank]).pow(3).mean(), optimizer)
    gradient = full_gradient(booster, model, "norm.weight")
    optimizer.step()
    return formats, gradient


def test_parameters_of_several_dtypes_in_one_unit_train():
    torch.manual_seed(0)
    model = MixedFormats()
    data = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    model(data).pow(3).mean().backward()
    for formats, gradient in run_on_ranks(mixed_formats, 2):
        assert formats == {name: parameter.dtype for name, parameter in model.named_parameters()}
        torch.testing.assert_close(gradient, model.norm.weight.grad, rtol=1e-4, atol=1e-6)


def batch_norm_under(precision):
    booster = Booster("cpu", precision, TorchFSDPPlugin())
    torch.manual_seed(DistCoordinator().rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        booster.backward(model(torch.randn(4, 3, 3, 3)).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    whole = whole_model(booster, model)
    return whole, dict(model.unwrap().named_buffers())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_and_running_statistics_are_the_same_on_every_rank(precision):
    (first, buffers), *others = run_on_ranks(batch_norm_under, 2, precision)
    assert all(tensor.isfinite().all() for tensor in first.values())
    for whole, own in others:
        assert [name for name in first if not torch.equal(first[name], whole[name])] == []
        assert [name for name in buffers if not torch.equal(buffers[name], own[name])] == []


# ---- evaluation, generation, loading, groups


def generated(name, precision):
    booster = Booster("cpu", precision, TorchFSDPPlugin())
    model, *_ = booster.boost(make(name))
    model.eval()
    prompt = torch.arange(1, 6).view(1, 5)
    before = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        model(input_ids=prompt, labels=prompt)
    with torch.inference_mode():
        after = model.generate(prompt, max_new_tokens=4, do_sample=False)
    return before.tolist(), after.tolist()


@pytest.mark.parametrize(
    "name", ["tied llama", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("t5", marks=pytest.mark.slow)]
)
def test_generate_equals_one_process(name):
    plain = make(name).eval()
    expected = plain.generate(torch.arange(1, 6).view(1, 5), max_new_tokens=4, do_sample=False).tolist()
    assert run_on_ranks(generated, 2, name, None) == [(expected, expected)] * 2


def test_generate_uses_the_precision_of_the_run():
    first, second = run_on_ranks(generated, 2, "tied llama", "bf16")
    assert first == second


def load_after_evaluation(folder):
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    model, *_ = booster.boost(make("tied llama"))
    booster.save_model(model, folder, shard=True)
    before = whole_model(booster, model)
    other = make("tied llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other, *_ = booster.boost(other)
    with torch.no_grad():
        loss_of(other, "tied llama", 0, 1)
        booster.load_model(other, folder)
        loaded, expected = (float(loss_of(m, "tied llama", 0, 1)) for m in (other, model))
    after = whole_model(booster, other)
    return loaded == expected, [name for name in before if not torch.equal(before[name], after[name])]


def test_loading_after_an_evaluation_loads_into_the_shards(tmp_path):
    assert run_on_ranks(load_after_evaluation, 2, str(tmp_path)) == [(True, [])] * 2


class Inplace(nn.Module):
    """Changes the output of a unit in place, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        x += 1.0
        return self.outer(x)


def ones(_number, _replica):
    return torch.ones(2, 3, 4)


def after_a_change(outputs, _batch):
    outputs *= 1.0
    return outputs.square().mean()


def test_in_place_operation_on_the_output_of_a_unit_keeps_its_gradient():
    case = Case(build=Inplace, batch=ones, loss=after_a_change, steps=1)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_classes": ["Linear"]}))


def groups_added_later():
    booster = Booster("cpu", plugin=TorchFSDPPlugin(ignored_modules=["second"]))
    torch.manual_seed(0)
    model = TinyMLP()
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam([model.first.weight], lr=0.1))
    before = whole_model(booster, model)
    optimizer.add_param_group({"params": [model.first.bias, model.second.weight], "lr": 0.2})
    with pytest.raises(ConfigError, match=r"'first\.bias' is in a parameter group already"):
        optimizer.add_param_group({"params": [model.first.bias]})
    with pytest.raises(ConfigError, match=r"Parameter 0 of the new group, of shape \(3,\), is not one of"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
    after = whole_model(booster, model)
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_param_groups_can_be_added_later():
    assert run_on_ranks(groups_added_later, 2) == [["first.weight", "first.bias", "second.weight"]] * 2


def rprop(model):
    return torch.optim.Rprop(model.parameters(), lr=0.01)


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def test_optimizer_without_dtensor_support_steps_on_rows():
    case = Case(build=TinyMLP, batch=rows, optimizer=rprop, max_norm=None)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, num_ranks=3))


def max_norm_of_the_plugin():
    norms = []
    for options in ({"max_norm": 0.05}, {}):
        booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
        torch.manual_seed(0)
        model = TinyMLP()
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = whole_model(booster, model)
        booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
        optimizer.step()
        after = whole_model(booster, model)
        norms.append(sum(float((before[name] - after[name]).square().sum()) for name in before) ** 0.5)
    return norms


def test_max_norm_clips_each_step():
    for clipped, whole in run_on_ranks(max_norm_of_the_plugin, 2):
        assert clipped == pytest.approx(0.05, rel=1e-3)
        assert whole > 0.06


# ---- user errors


def boost(options, model_name="mixed bag", optimizer_class=None):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
    model = TinyMixedBag() if model_name == "mixed bag" else MODELS[model_name]()
    booster.boost(model, None if optimizer_class is None else optimizer_class(model.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"replica_size": 3},
            "`replica_size=3` does not divide the world size 2. Use one of 1, 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"reshard_after_forward": 3},
            "`reshard_after_forward=3` does not divide the 2 ranks of a sharded model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"unit_classes": ["Missing"]},
            "`unit_classes` names 'Missing', but the model has no module of that class",
            marks=pytest.mark.slow,
        ),
        ({"forward_methods": ["encode"]}, "`forward_methods` names 'encode', which TinyMixedBag does not have"),
    ],
)
def test_invalid_option_raises_on_every_rank(options, message):
    expect_on_ranks(ConfigError, message, boost, 2, options)


def test_optimizer_over_all_parameters_as_one_vector_raises():
    expect_on_ranks(ConfigError, "LBFGS can't be sharded", boost, 2, {}, "conv", torch.optim.LBFGS)


def boost_aliases():
    model = TinyMLP()
    model.first.bias = nn.Parameter(model.second.weight.data[0])
    Booster("cpu", plugin=TorchFSDPPlugin()).boost(model)


def test_two_parameters_that_share_memory_raise():
    expect_on_ranks(
        ConfigError, "'first.bias' and 'second.weight' are two objects over the same memory", boost_aliases, 2
    )
