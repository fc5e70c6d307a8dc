"""FSDP compared with one process on various models, by parameter name."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise, zoo_case
from driven_runs import assert_same_loop, same_loop
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_testing.compare import Tolerance, tolerance_for
from booster_testing.models import TinyMixedBag, TinyMLP
from booster_testing.training import whole_model

OPTIONS = {
    "small units": {"unit_min_numel": 200},
    "keep gathered": {"reshard_after_forward": False},
    "prefetch": {"unit_min_numel": 500, "forward_prefetch": 2, "backward_prefetch": 2},
    "replicas": {"replica_size": 2},
    "to pairs": {"reshard_after_forward": 2},
    "ignored": {"ignored_modules": ["Linear"]},
    "offload": {"cpu_offload": True},
}


CASES = [("small units", "own/channels_last"), *((each, "transformers/llama_tied") for each in OPTIONS)]


@matrix(["small units-own/channels_last", "ignored-transformers/llama_tied"], **{"options, name": CASES})
def test_gradients_with_each_option_equal_one_process(options, name):
    case = zoo_case(name, steps=1, max_norm=0.1)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, OPTIONS[options], 4))


# ---- a checkpoint of the whole model, which backward runs again


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saves_tensors", "runs_backward_inside"])
@same_loop(Case(build=net, batch=noise(4, 8)), Setting(TorchFSDPPlugin, {"unit_classes": ("Linear",)}))
def test_a_checkpoint_of_the_whole_model(run, use_reentrant):
    def loss_of(batch, _):
        return checkpoint(run.model, batch.requires_grad_(), use_reentrant=use_reentrant).square().mean()

    for step in range(3):
        run.backward(run.mean(step, loss_of))
        with torch.no_grad():
            run.loss(step)
        run.step()


# ---- mixed dtypes, and parameters that torch's FSDP can't shard


def frozen_first(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype)
    model[0].requires_grad_(False)
    return model


def rows_of(dtype, number, replica):
    return noise(2, 4)(number, replica).to(dtype)


def all_listed(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def thaws(run):
    for step in range(3):
        run.net[0].requires_grad_(step > 0)
        run.backward(run.loss(step))
        run.step()


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (torch.float64, None, Tolerance(relative=1e-12, reason="sums of fp64 in another order")),
        (torch.float32, "bf16", tolerance_for(torch.bfloat16)),  # one process computes in fp32
    ],
    ids=["fp64", "bf16"],
)
def test_gradients_of_a_unit_that_was_frozen_at_boost_keep_their_precision(dtype, precision, tolerance):
    build, batch = partial(frozen_first, dtype), partial(rows_of, dtype)
    case = Case(build=build, batch=batch, optimizer=all_listed, tolerance=tolerance)
    assert_same_loop(thaws, case, Setting(TorchFSDPPlugin, {"unit_min_numel": 1}, precision=precision))


@on_ranks(2)
def test_empty_parameter_equals_one_process():
    class WithEmpty(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.rows = nn.Parameter(torch.empty(0, 8))

        def forward(self, x):
            return torch.cat([self.inner(x), x @ self.rows.t()], dim=1)

    assert_equals_one_process(Case(build=WithEmpty, batch=noise(4, 8)), Setting(TorchFSDPPlugin))


@on_ranks(2)
def test_in_place_operation_on_the_output_of_a_unit_keeps_its_gradient():
    class Inplace(nn.Sequential):
        """Changes the output of a unit in place, a view."""

        def forward(self, x):
            x = self[0](x)
            x += 1.0
            return self[1](x)

    def after_a_change(outputs, _batch):
        outputs *= 1.0
        return outputs.square().mean()

    def build():
        return Inplace(nn.Linear(4, 4), nn.Linear(4, 4))

    case = Case(build=build, batch=noise(2, 3, 4), loss=after_a_change, steps=1)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_classes": ["Linear"]}))


OPTIMIZERS = {
    "muon": torch.optim.Muon,
    "adafactor": torch.optim.Adafactor,
    "adamw": torch.optim.AdamW,
    "rprop": torch.optim.Rprop,
}


@matrix(["adafactor", "rprop"], name=list(OPTIMIZERS))
@on_ranks(4)
def test_matrices_with_fewer_rows_than_ranks_equal_one_process(name, tmp_path):
    def few_rows():
        widths = [6, 2, 3, 1, 1, 4, 5]  # one matrix has one element
        return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))

    def optimizer_over(model):
        return OPTIMIZERS[name](model.parameters(), lr=0.05)

    case = Case(build=few_rows, batch=noise(2, 6), optimizer=optimizer_over, max_norm=None)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_min_numel": 4}, 4), checkpoint=tmp_path)


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
        ({"forward_methods": ["encode"]}, "`forward_methods` names 'encode', which TinyMixedBag does not have"),
    ],
)
@on_ranks(2)
def test_invalid_option_raises_on_every_rank(options, message):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
    with pytest.raises(ConfigError, match=message):
        booster.boost(TinyMixedBag())


@raises_on_ranks(ConfigError, "LBFGS can't be sharded", 2)
def test_optimizer_over_all_parameters_as_one_vector_raises():
    model = TinyMLP()
    Booster("cpu", plugin=TorchFSDPPlugin()).boost(model, torch.optim.LBFGS(model.parameters()))


HOOKS = "Parameter '1.weight' has hooks on its gradient, which FSDP drops"


@pytest.mark.parametrize(
    ("change", "match"),
    [("hook", HOOKS), ("accumulate hook", HOOKS), ("sparse", "The gradients of '0' are sparse.*sparse=False")],
)
@on_ranks(2)
def test_boost_refuses(change, match):
    model = nn.Sequential(nn.Embedding(10, 8, sparse=change == "sparse"), nn.Linear(8, 8))
    if change == "hook":
        model[1].weight.register_hook(lambda gradient: 3 * gradient)
    elif change == "accumulate hook":
        model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    with pytest.raises(ConfigError, match=match):
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
