"""Parameters and buffers that DDP ignores stay rank-local, as with torch's wrapper by hand."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from compiler_warnings import ignore_compiler_warnings
from matrix import matrix, named
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_testing import expect_on_ranks, run_on_ranks

IGNORED = ["local.weight", "local.bias", "local_scale"]
OPTIONS = [{}, {"find_unused_parameters": False}]


class PartlyLocal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.local = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("shared_scale", torch.rand(8))
        self.register_buffer("local_scale", torch.rand(8))

    def forward(self, x):
        return self.local((self.shared(x * self.shared_scale).tanh()) * self.local_scale)


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 8, generator=generator)


def tensors_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def seeded_by_rank():
    torch.manual_seed(dist.get_rank())
    return PartlyLocal()


def train_by_hand(*, ignored, **options):
    model = seeded_by_rank()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        ddp(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return tensors_of(model)


def train_by_hand_without_broadcast():
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    return train_by_hand(ignored=[], broadcast_buffers=False)


def train(*, ignored, compiled=False, accumulated=False, folder=None, **options):
    model = original = seeded_by_rank()
    if ignored:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if compiled:
        ignore_compiler_warnings()
        model = torch.compile(model, backend="eager")
    booster = Booster("cpu", plugin=TorchDDPPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0))
    for step in range(3):
        if accumulated:
            with booster.no_sync(model):
                booster.backward(model(batch(step)).square().mean(), optimizer)
        else:
            booster.backward(model(batch(step)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        booster.save_model(model, folder / "model", shard=True)
    return tensors_of(original)


def assert_equal(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_broadcast_buffers_false_keeps_buffers_rank_local(options):
    expected = run_on_ranks(train_by_hand_without_broadcast, 2)
    assert not torch.equal(expected[0]["shared_scale"], expected[1]["shared_scale"])
    assert_equal(run_on_ranks(train, 2, ignored=[], broadcast_buffers=False, **options), expected)


@matrix(1, options=named(OPTIONS, str), how=named([{}, {"compiled": True}, {"accumulated": True}], str))
def test_ignored_parameters_and_buffers_stay_rank_local(options, how):
    expected = run_on_ranks(train_by_hand, 2, ignored=IGNORED)
    for name in IGNORED:
        assert not torch.equal(expected[0][name], expected[1][name])
    assert torch.equal(expected[0]["shared.weight"], expected[1]["shared.weight"])
    assert_equal(run_on_ranks(train, 2, ignored=IGNORED, **options, **how), expected)


def test_ignored_parameters_are_saved_from_the_first_rank(tmp_path):
    first, _second = run_on_ranks(train, 2, ignored=IGNORED, folder=tmp_path)
    saved = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        saved |= load_file(file)
    assert_equal([saved], [first])


def test_ignoring_an_unknown_name_raises():
    expect_on_ranks(ConfigError, "'missing.weight'", train, 2, ignored=["missing.weight"])


def clip(options):
    model = seeded_by_rank()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
    booster = Booster("cpu", plugin=TorchDDPPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(batch(0)).square().mean(), optimizer)
    optimizer.clip_grad_by_norm(1.0)


def test_clipping_by_a_norm_that_differs_between_ranks_raises():
    expect_on_ranks(ConfigError, "'local.weight'.*`clip_grad_by_value`", clip, 2, {})
