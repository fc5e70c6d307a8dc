"""A copy or a pickle of a boosted model: it computes what the model does, or raises where it is made."""

import copy
import io
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plugin_runs import RUNS, boosted
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_testing.models import tiny_llama

WHOLE = {"ddp": 2, "zero": 2}
"""Strategies whose ranks hold all parameters, and the number of ranks."""


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3))


def boost(plugin, precision=None):
    booster = Booster("cpu", precision, plugin)
    net = make()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return booster, model, optimizer


def step(booster, model, optimizer, seed):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    booster.backward(model(x).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def evaluated(model, x):
    model.eval()
    with torch.no_grad():
        return model(x).clone()


@pytest.mark.parametrize(
    ("plugin", "precision", "inside"),
    [
        ("ddp", "bf16", False),
        pytest.param("zero", "bf16", False, marks=pytest.mark.slow),
        *((plugin, None, True) for plugin in (*WHOLE, "hybrid")),
    ],
)
@on_ranks(2)
def test_a_copy_computes_what_the_model_did(plugin, precision, inside):
    """A copy of the boosted model, or of the user's own inside."""
    booster, model, optimizer = boost(plugin, precision)
    step(booster, model, optimizer, 0)
    x = torch.ones(2, 6)
    before = evaluated(model, x)  # first: DDP gives each rank the buffers of rank 0 in its next forward
    twin = copy.deepcopy(model.unwrap() if inside else model)
    assert torch.equal(evaluated(twin, x), before)
    model.train()
    step(booster, model, optimizer, 1)
    assert torch.equal(evaluated(twin, x), before)
    assert not torch.equal(evaluated(model, x), before)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in make().named_parameters()]


@pytest.mark.parametrize(
    ("plugin", "error", "match"),
    [
        ("gemini", ConfigError, r"is kept in shards.*`booster_runtime.ema\("),
        ("fsdp", AssertionError, "FSDP does not support deepcopy"),
    ],
)
@on_ranks(2)
def test_a_copy_of_the_own_model_raises(plugin, error, match):
    booster, model, optimizer = boost(plugin)
    step(booster, model, optimizer, 0)
    with pytest.raises(error, match=match):
        copy.deepcopy(model.unwrap())


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("plugin", [None, *WHOLE])
@on_ranks(lambda plugin: WHOLE.get(plugin, 1))
def test_a_pickle_computes_what_the_model_did(plugin, precision):
    """Compare what a pickle, which rank 0 makes alone, and the model compute."""
    booster, model, optimizer = boost(plugin, precision)
    step(booster, model, optimizer, 0)
    file = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save({"model": model, "step": 1}, file)
    x = torch.ones(2, 6)
    expected = evaluated(model, x)
    model.train()
    step(booster, model, optimizer, 1)
    assert not torch.equal(expected, evaluated(model, x))
    if dist.get_rank() == 0:
        file.seek(0)
        twin = torch.load(file, weights_only=False)["model"]
        assert torch.equal(expected, evaluated(twin, x))
        assert [name for name, _ in twin.named_parameters()] == [name for name, _ in make().named_parameters()]
        twin.train()
        twin(torch.randn(4, 6)).sum().backward()  # it belongs to no run
        assert all(parameter.grad is not None for parameter in twin.parameters())


@pytest.mark.parametrize("run", ["fsdp", "gemini", "hybrid-dp", "zero3", "hybrid-tp", "hybrid-pp"])
@raises_on_ranks(
    CheckpointError,
    r"can't be pickled, as `torch\.save\(model, path\)` does.*Call `booster\.save_model\(model, path\)` on",
    2,
)
def test_a_pickle_of_a_split_model_raises_with_the_remedy(run):
    net = tiny_llama() if run in ("hybrid-tp", "hybrid-pp") else make()
    _, model, _ = boosted(RUNS[run], net)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder) / "model.pt")
