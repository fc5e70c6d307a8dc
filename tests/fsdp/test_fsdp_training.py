"""FSDP compared with one process on various models, by parameter name; evaluation, generation and loading."""

from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process
from driven_runs import assert_same_loop
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import Tolerance
from booster_testing.models import TinyMixedBag, TinyMLP, tiny_llama
from booster_testing.training import whole_model


class ConvNet(nn.Module):
    """Convolutions with GroupNorm, a layer in another memory format, and a scalar parameter."""

    def __init__(self):
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


# ---- different use on different ranks, and mixed dtypes


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


def test_generate_uses_the_precision_of_the_run():
    first, second = run_on_ranks(generated, 2, "tied llama", "bf16")
    assert first == second


@on_ranks(2)
def test_loading_after_an_evaluation_loads_into_the_shards(tmp_path):
    folder = str(tmp_path)
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
    assert (loaded == expected, [name for name in before if not torch.equal(before[name], after[name])]) == (True, [])


class Inplace(nn.Module):
    """Changes the output of a unit in place, a view."""

    def __init__(self):
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


def rprop(model):
    return torch.optim.Rprop(model.parameters(), lr=0.01)


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def test_optimizer_without_dtensor_support_steps_on_rows():
    case = Case(build=TinyMLP, batch=rows, optimizer=rprop, max_norm=None)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, num_ranks=3))


@on_ranks(2)
def test_max_norm_clips_each_step():
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
    clipped, whole = norms
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


@raises_on_ranks(ConfigError, "'first.bias' and 'second.weight' are two objects over the same memory", 2)
def test_two_parameters_that_share_memory_raise():
    model = TinyMLP()
    model.first.bias = nn.Parameter(model.second.weight.data[0])
    Booster("cpu", plugin=TorchFSDPPlugin()).boost(model)
