"""Clipping is by the gradients of all trained parameters of a model, under every plugin, whatever the optimizer lists.

What it is compared with is torch's own clipping of ``model.parameters()`` in one process.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, train_boosted, train_plainly
from matrix import matrix
from plugin_runs import RUNS, boosted, runs
from ranked import on_ranks
from residual_stack import SPLIT, Stack
from torch import nn

from booster_core import LossScaleConfig, PrecisionPolicy
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

MAX_NORM, MAX_VALUE = 0.1, 0.01
EXAMPLE = torch.ones(2, 8)
SETTINGS = {
    **runs("single", "ddp", "fsdp", "zero1", "zero2"),
    "fsdp-some-whole": Setting(TorchFSDPPlugin, {"ignored_modules": ["layers.1"]}),
    "zero-replicas": Setting(LowLevelZeroPlugin, {"replica_size": 2}),
    "zero-parameters": Setting(LowLevelZeroPlugin, {"partition": "parameter"}),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 256}),
    "hybrid": Setting(HybridParallelPlugin),
    "hybrid-zero3": RUNS["zero3"],
    "hybrid-tp2": Setting(HybridParallelPlugin, {"tp_size": 2, "custom_policy": SPLIT}),
    "hybrid-pp2": Setting(HybridParallelPlugin, {"pp_size": 2, "custom_policy": SPLIT, "example_batch": EXAMPLE}),
}
UNLISTED = ("layers.0.down.", "layers.3.up.")


def make_model(dtype=torch.float32):
    """Return a model of which one layer is frozen."""
    model = Stack().to(dtype)
    model.layers[2].requires_grad_(requires_grad=False)
    return model


def of_some(model):
    """Return an optimizer that lists a part of what is trained."""
    listed = [each for name, each in model.named_parameters() if each.requires_grad and not name.startswith(UNLISTED)]
    return torch.optim.SGD(listed, lr=0.1)


def rows(dtype, number, replica):
    generator = torch.Generator().manual_seed(10 * number + replica)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64).to(dtype) * 3


def drop_unlisted(_step, model, _optimizer):
    if not dist.is_initialized():  # plugins drop every gradient in the optimizer's `zero_grad`
        model.zero_grad()


def case_of(how, dtype=torch.float32, **changes):
    limits = {"max_norm": MAX_NORM} if how == "norm" else {"max_norm": None, "max_value": MAX_VALUE}
    settings = {"build": partial(make_model, dtype), "batch": partial(rows, dtype), "tolerance": tolerance_for(dtype)}
    own = {"optimizer": of_some, "before_step": drop_unlisted, "steps": 2, "shows_clipped": True}
    return Case(**{**settings, **own, **limits, **changes})


def setting_of(name, precision=None):
    return replace(SETTINGS[name], precision=precision)


@matrix(
    [*(f"{name}-norm" for name in SETTINGS), "single-value", "ddp-value", "zero1-value"],
    name=SETTINGS,
    how=["norm", "value"],
)
def test_all_trained_parameters_are_clipped(name, how):
    assert_equals_one_process(case_of(how), setting_of(name))


@matrix(["single", "fsdp", "zero1", "gemini"], name=SETTINGS)
def test_norms_of_fp64_gradients_keep_fp64(name):
    assert_equals_one_process(case_of("norm", torch.float64), setting_of(name))


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero1", "gemini"])
def test_gradients_under_a_loss_scale_are_clipped_without_it(name):
    case = case_of("norm", tolerance=tolerance_for(torch.float16))
    setting = setting_of(name, PrecisionPolicy.parse("fp16", loss_scale=LossScaleConfig(initial_scale=128.0)))
    with torch.autocast("cpu", torch.float16):
        expected = train_plainly(case, setting.num_ranks)
    for trained in (each.trained for each in run_on_ranks(train_boosted, setting.num_ranks, case, setting)):
        assert trained.norms[0] == pytest.approx(expected.norms[0], rel=case.tolerance.relative)
        for found, plain in zip(trained.gradients[:2], expected.gradients[:2], strict=True):
            assert_same_tensors({each: gradient.float() for each, gradient in found.items()}, plain, case.tolerance)
        assert trained.norms[1] > MAX_NORM, "gradients of the first step are gone, and the scale of these is out"
        assert math.isfinite(trained.norms[1])


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero1", "zero-parameters", "gemini", "hybrid-zero3"])
@on_ranks(lambda name: SETTINGS[name].num_ranks)
def test_one_parameter_in_fp64_makes_the_norm_fp64_on_every_rank(name):
    """It is so small that few ranks hold a part of it."""

    class OneInFp64(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return self.second(torch.tanh(self.first(x))) * self.scale

    torch.manual_seed(0)
    booster, model, optimizer = boosted(SETTINGS[name], OneInFp64())
    booster.backward(model(rows(torch.float32, 0, 0)).square().mean(), optimizer)
    norm = optimizer.clip_grad_by_norm(MAX_NORM)
    assert norm.dtype == torch.float64
    assert len(set(booster.context.coordinator.all_gather_object(float(norm)))) == 1


def adaptive(model):
    return torch.optim.AdamW(of_some(model).param_groups[0]["params"], lr=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("saving", "loading"), [("zero1", "zero2"), ("zero1", "ddp"), ("ddp", "zero1"), ("gemini", "gemini")]
)
def test_a_checkpoint_of_an_optimizer_of_a_part_loads(saving, loading, precision, tmp_path):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    case = case_of("norm", optimizer=adaptive, tolerance=tolerance_for(dtype))
    before, after = setting_of(saving, precision), setting_of(loading, precision)
    undisturbed = run_on_ranks(train_boosted, 2, case, before)
    resumed = run_on_ranks(train_boosted, 2, case, before, None, tmp_path, after)
    for found, wanted in zip(resumed, undisturbed, strict=True):
        widened = (
            {name: values.float() for name, values in each.trained.parameters.items()} for each in (found, wanted)
        )
        assert_same_tensors(*widened, case.tolerance)
