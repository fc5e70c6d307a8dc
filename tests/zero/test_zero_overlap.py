"""Gathers that go on after ``step``: whoever reads a parameter too early finds NaN here, and must not.

In these tests a gather hides what it brings: other ranks' parts of a bucket are NaN until it has been waited for.
"""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from late_gathers import hidden_until_waited_for
from ranked import on_ranks
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import booster_runtime
from booster_core import Booster
from booster_zero import LowLevelZeroPlugin

WIDTH = 8


class Base(nn.Module):
    """Two matrices, of which subclasses make odd use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.odd(torch.tanh(self.first(x)))

    def odd(self, x):
        return self.second(x)


class TiedHead(Base):
    def odd(self, x):
        return F.linear(torch.tanh(self.second(x)), self.first.weight.T)


class ByNumpy(Base):
    """Reads memory by no torch function but the one that hands it out."""

    def odd(self, x):
        return x * float(self.second.weight.detach().numpy().sum()) + self.second(x)


class Scripted(Base):
    def __init__(self):
        super().__init__()
        self.second = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH))


class LazyOutput(Base):
    """Returns something that reads a parameter after forward has ended."""

    def forward(self, x):
        first = self.first(x)
        return lambda: self.second(first)


def boosted(net, precision="fp32", **options):
    booster = Booster("cpu", precision, LowLevelZeroPlugin(bucket_bytes=64, **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    return booster, model, optimizer


@pytest.mark.parametrize(
    ("model_class", "options", "precision"),
    [
        # `test_gathering_uses` has more ways to use a parameter, all of which one mechanism sees.
        *((model_class, {}, "fp32") for model_class in (TiedHead, ByNumpy, LazyOutput, Scripted)),
        (TiedHead, {"stage": 2}, "bf16"),
        (TiedHead, {"stage": 2}, "fp16"),
        (TiedHead, {"offload": "cpu"}, "fp32"),
        (TiedHead, {"partition": "parameter"}, "fp32"),
    ],
)
@on_ranks(2, timeout_seconds=150)
def test_no_forward_reads_a_parameter_that_is_not_there_yet(model_class, options, precision):
    if model_class is Scripted:
        warnings.simplefilter("ignore")  # scripting is deprecated

    def trained(*, overlaps):
        torch.manual_seed(0)
        booster, model, optimizer = boosted(model_class(), precision, overlap_allgather=overlaps, **options)
        losses = []
        with hidden_until_waited_for(most_seconds=1e-3) if overlaps else contextlib.nullcontext():
            for step in range(4):
                x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                output = model(x)
                loss = (output() if callable(output) else output).float().square().mean()
                booster.backward(loss, optimizer)
                optimizer.clip_grad_by_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                assert optimizer.engine.gatherer.is_underway == overlaps
            return losses, {name: value.clone() for name, value in model.state_dict().items()}

    (expected, others), (losses, parameters) = trained(overlaps=False), trained(overlaps=True)
    assert losses == expected
    assert all(torch.equal(others[name], value) for name, value in parameters.items())


# ---- everything that is not forward


def without_grad(module, *args):
    with torch.no_grad():
        return module(*args)


READS = {
    "parameters": lambda booster, model, optimizer: [p.detach().clone() for p in model.parameters()],
    "attribute": lambda booster, model, optimizer: [model.second.weight.detach().clone()],
    "module": lambda booster, model, optimizer: [model.module.second.weight.detach().clone()],
    "unwrap": lambda booster, model, optimizer: [model.unwrap().second.weight.detach().clone()],
    "state_dict": lambda booster, model, optimizer: [*model.state_dict().values()],
    "modules": lambda booster, model, optimizer: [p.detach() for m in model.modules() for p in m.parameters()],
    "children": lambda booster, model, optimizer: [p.detach() for m in model.children() for p in m.parameters()],
    "eval": lambda booster, model, optimizer: [model.eval()(torch.ones(2, WIDTH)).detach()],
    "ema": lambda booster, model, optimizer: [each.data for each in booster_runtime.ema(booster, model, 0.5).shards()],
    "own state_dict": lambda booster, model, optimizer: [*model._modules["module"].state_dict().values()],
    "own forward": lambda booster, model, optimizer: [without_grad(model._modules["module"], torch.ones(2, WIDTH))],
    "own layer": lambda booster, model, optimizer: [model._modules["module"]._modules["second"](torch.ones(2, WIDTH))],
}


@pytest.mark.parametrize("how", list(READS))
@on_ranks(2)
def test_whoever_asks_for_parameters_waits(how):
    torch.manual_seed(0)
    booster, model, optimizer = boosted(Base(), overlap_allgather=True)
    with hidden_until_waited_for(most_seconds=1e-3):
        for _ in range(2):
            booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
            optimizer.step()
        assert optimizer.engine.gatherer.is_underway
        assert all(bool(value.isfinite().all()) for value in READS[how](booster, model, optimizer))


@on_ranks(2)
def test_checkpoints_wait(tmp_path):
    torch.manual_seed(0)
    booster, model, optimizer = boosted(Base(), "bf16", overlap_allgather=True)
    with hidden_until_waited_for(most_seconds=1e-3):
        for step in range(3):
            booster.backward(model(torch.ones(2, WIDTH)).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.engine.gatherer.is_underway
            if step == 1:
                booster.save_model(model, f"{tmp_path}/model")
            if step == 2:
                booster.save_optimizer(optimizer, f"{tmp_path}/optimizer")
                booster.load_optimizer(optimizer, f"{tmp_path}/optimizer")
                booster.load_model(model, f"{tmp_path}/model")
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


@on_ranks(2, timeout_seconds=30)
def test_one_rank_may_look_at_parameters_alone():
    torch.manual_seed(0)
    booster, model, optimizer = boosted(Base(), overlap_allgather=True)
    for _ in range(3):
        booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            assert model.second.weight.detach().isfinite().all()
            assert model(torch.ones(2, WIDTH)).detach().isfinite().all()
        dist.barrier()  # the other waits here for the one that waits for its part
