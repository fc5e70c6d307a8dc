"""Clipping is by the gradients of all trained parameters of a model, under every plugin, whatever the optimizer lists.

What it is compared with is torch's own clipping of ``model.parameters()`` in one process.
"""

import math

import pytest
import torch
from torch import nn

from booster_core import Booster, LossScaleConfig, PrecisionPolicy
from booster_core.ranks import DistCoordinator
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

MAX_NORM, MAX_VALUE = 0.1, 0.01
SPLIT = ShardingPolicy(
    rules=(ModuleRule("layers.*.up", Style.COLUMN), ModuleRule("layers.*.down", Style.ROW)), layers=("layers",)
)
EXAMPLE = torch.ones(2, 8)
PLUGINS = {
    "single": lambda: None,
    "ddp": lambda: "ddp",
    "fsdp": TorchFSDPPlugin,
    "fsdp-some-whole": lambda: TorchFSDPPlugin(ignored_modules=["layers.1"]),
    "zero1": LowLevelZeroPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "zero-replicas": lambda: LowLevelZeroPlugin(replica_size=2),
    "zero-parameters": lambda: LowLevelZeroPlugin(partition="parameter"),
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
    "hybrid": HybridParallelPlugin,
    "hybrid-zero3": lambda: HybridParallelPlugin(zero_stage=3),
    "hybrid-tp2": lambda: HybridParallelPlugin(tp_size=2, custom_policy=SPLIT),
    "hybrid-pp2": lambda: HybridParallelPlugin(pp_size=2, custom_policy=SPLIT, example_batch=EXAMPLE),
}
SHARED_BATCHES = ["single", "hybrid-tp2", "hybrid-pp2"]
UNLISTED = ("layers.0.down.", "layers.3.up.")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make_model(dtype=torch.float32):
    """Return a model of which one layer is frozen, and an optimizer that lists a part of the others."""
    torch.manual_seed(0)
    model = Stack().to(dtype)
    model.layers[2].requires_grad_(requires_grad=False)
    listed = [each for name, each in model.named_parameters() if each.requires_grad and not name.startswith(UNLISTED)]
    return model, torch.optim.SGD(listed, lr=0.1)


def rows(step, dtype=torch.float32):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype) * 3


def criterion(outputs, _):
    return outputs.square().mean()


def expected(how, dtype=torch.float32):
    """Return the norms and clipped gradients of each step, and the parameters at the end, of one process."""
    model, optimizer = make_model(dtype)
    found = []
    for step in range(2):
        criterion(model(rows(step, dtype)), None).backward()
        norm = None
        if how == "norm":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
        found.append((norm, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
        optimizer.step()
        model.zero_grad()
    return found, {name: parameter.detach() for name, parameter in model.named_parameters()}


def clipped(name, how, precision=None, dtype=torch.float32):
    booster = Booster("cpu", precision, PLUGINS[name]())
    model, optimizer = make_model(dtype)
    names = [each for each, parameter in model.named_parameters() if parameter.requires_grad]
    model, optimizer, *_ = booster.boost(model, optimizer)
    coordinator = DistCoordinator()
    found = []
    for step in range(2):
        batch = rows(step, dtype)
        if name not in SHARED_BATCHES:
            batch = batch[coordinator.rank :: coordinator.world_size]
        if name == "hybrid-pp2":
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        else:
            booster.backward(criterion(model(batch), None), optimizer)
        norm = None
        if how == "norm":
            norm = optimizer.clip_grad_by_norm(MAX_NORM)
        else:
            optimizer.clip_grad_by_value(MAX_VALUE)
        found.append((norm, {each: full_gradient(booster, model, each) for each in names}))
        optimizer.step()
        optimizer.zero_grad()
    return found, whole_model(booster, model)


def assert_equal(found, wanted, dtype):
    (steps, values), (wanted_steps, wanted_values) = found, wanted
    for (norm, gradients), (wanted_norm, wanted_gradients) in zip(steps, wanted_steps, strict=True):
        if wanted_norm is not None:
            assert norm.dtype == dtype
            assert float(norm) == pytest.approx(float(wanted_norm), rel=tolerance_for(dtype).relative)
            assert float(norm) > MAX_NORM, "it is clipped"
        assert_same_tensors(gradients, wanted_gradients, tolerance_for(dtype))
    assert_same_tensors(values, wanted_values, tolerance_for(dtype))


@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("name", list(PLUGINS))
def test_all_trained_parameters_are_clipped(name, how):
    wanted = expected(how)
    for found in run_on_ranks(clipped, 1 if name == "single" else 2, name, how):
        assert_equal(found, wanted, torch.float32)


@pytest.mark.parametrize("name", list(PLUGINS))
def test_norms_of_fp64_gradients_keep_fp64(name):
    wanted = expected("norm", torch.float64)
    for found in run_on_ranks(clipped, 1 if name == "single" else 2, name, "norm", None, torch.float64):
        assert_equal(found, wanted, torch.float64)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero1", "gemini"])
def test_gradients_under_a_loss_scale_are_clipped_without_it(name):
    with torch.autocast("cpu", torch.float16):
        (norm, gradients), *_ = expected("norm")[0]
    scaled = PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=128.0))
    for steps, _ in run_on_ranks(clipped, 1 if name == "single" else 2, name, "norm", scaled):
        assert float(steps[0][0]) == pytest.approx(float(norm), rel=tolerance_for(torch.float16).relative)
        found = {each: gradient.float() for each, gradient in steps[0][1].items()}
        assert_same_tensors(found, gradients, tolerance_for(torch.float16))
        assert float(steps[1][0]) > MAX_NORM, "gradients of the first step are gone, and the scale of these is out"
        assert math.isfinite(steps[1][0])


class OneInFp64(nn.Module):
    """A model whose only parameter in fp64 is so small that few ranks hold a part of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def norm_of_mixed(name):
    torch.manual_seed(0)
    model = OneInFp64()
    booster = Booster("cpu", plugin=PLUGINS[name]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(criterion(model(rows(0)), None), optimizer)
    return optimizer.clip_grad_by_norm(MAX_NORM)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero1", "zero-parameters", "gemini", "hybrid-zero3"])
def test_one_parameter_in_fp64_makes_the_norm_fp64_on_every_rank(name):
    norms = run_on_ranks(norm_of_mixed, 1 if name == "single" else 2, name)
    assert {norm.dtype for norm in norms} == {torch.float64}
    assert len({float(norm) for norm in norms}) == 1


def step(booster, model, optimizer, seed):
    coordinator = DistCoordinator()
    batch = rows(seed)[coordinator.rank :: coordinator.world_size]
    booster.backward(criterion(model(batch), None), optimizer)
    optimizer.clip_grad_by_norm(MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def boost_by(name, precision):
    booster = Booster("cpu", precision, PLUGINS[name]())
    model, optimizer = make_model()
    listed = torch.optim.AdamW(optimizer.param_groups[0]["params"], lr=0.01)
    model, optimizer, *_ = booster.boost(model, listed)
    return booster, model, optimizer


def saved_and_loaded(saving, loading, folder, precision):
    """Return the parameters after a step that follows a load, and after the same step of the run that was saved."""
    booster, model, optimizer = boost_by(saving, precision)
    step(booster, model, optimizer, 0)
    booster.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    other, loaded, stepped = boost_by(loading, precision)
    other.load_checkpoint(folder, model=loaded, optimizer=stepped)
    step(booster, model, optimizer, 1)
    step(other, loaded, stepped, 1)
    return whole_model(other, loaded), whole_model(booster, model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("saving", "loading"), [("zero1", "zero2"), ("zero1", "ddp"), ("ddp", "zero1"), ("gemini", "gemini")]
)
def test_a_checkpoint_of_an_optimizer_of_a_part_loads(saving, loading, precision, tmp_path):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for found, wanted in run_on_ranks(saved_and_loaded, 2, saving, loading, tmp_path, precision):
        widened = ({each: values.float() for each, values in held.items()} for held in (found, wanted))
        assert_same_tensors(*widened, tolerance_for(dtype))


def added_later(name):
    """Return the parameters of a run in which a group lists the rest from the second step on."""
    booster = Booster("cpu", plugin=PLUGINS[name]())
    model, optimizer = make_model()
    model, optimizer, *_ = booster.boost(model, optimizer)
    step(booster, model, optimizer, 0)
    rest = [each for path, each in model.unwrap().named_parameters() if path.startswith(UNLISTED)]
    optimizer.add_param_group({"params": rest, "lr": 0.05})
    step(booster, model, optimizer, 1)
    return whole_model(booster, model)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", "zero2", "zero-parameters", "gemini", "hybrid"])
def test_a_group_may_list_them_later(name):
    model, optimizer = make_model()
    for seed in range(2):
        if seed == 1:
            rest = [each for path, each in model.named_parameters() if path.startswith(UNLISTED)]
            optimizer.add_param_group({"params": rest, "lr": 0.05})
        criterion(model(rows(seed)), None).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        model.zero_grad()
    wanted = {path: parameter.detach() for path, parameter in model.named_parameters()}
    for found in run_on_ranks(added_later, 2, name):
        assert_same_tensors(found, wanted, tolerance_for(torch.float32))
