"""A gradient that no optimizer of the strategy knows of raises; without gradients a model needs no optimizer."""

import torch
import torch.distributed as dist
from cases import Setting
from matrix import matrix, named
from plugin_runs import RUNS
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core.errors import GradientError
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.compare import assert_same_tensors, tolerance_for

PLUGINS = {
    "fsdp": Setting(TorchFSDPPlugin, {"unit_classes": ["Linear"]}),
    "fsdp, one replicated": Setting(TorchFSDPPlugin, {"ignored_modules": ["0"]}),
    "zero": RUNS["zero1"],
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 256}),
    "hybrid": Setting(HybridParallelPlugin),
    "hybrid zero": RUNS["hybrid-dp"],
    "hybrid zero3": RUNS["zero3"],
}
CLOSE = tolerance_for(torch.float32)


def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


@matrix(
    [
        "trained-zero",
        "trained-hybrid",
        "trained-fsdp",
        "trained-fsdp, one replicated",
        "unfrozen after boost-fsdp",
        "unfrozen after boost-gemini",
        "unfrozen after boost-hybrid zero",
    ],
    frozen=named([False, True], ["trained", "unfrozen after boost"]),
    name=PLUGINS,
)
@raises_on_ranks(
    GradientError, "got a gradient, but the model was boosted without an optimizer.*Pass the optimizer to `boost`", 2
)
def test_a_model_boosted_without_an_optimizer_does_not_train(name, *, frozen):
    model = make().requires_grad_(requires_grad=not frozen)
    model = PLUGINS[name].make_booster().boost(model).model
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(dist.get_rank())).square().mean().backward()
    optimizer.step()


@matrix(["fsdp", "zero", "gemini", "hybrid", "hybrid zero"], name=PLUGINS)
@on_ranks(2)
def test_without_gradients_of_parameters_no_optimizer_is_needed(name):
    expected, x = make(), batch()
    booster = PLUGINS[name].make_booster()
    model = booster.boost(make()).model
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert torch.equal(model(x), expected(x)), "the graph is made, and not run"
    frozen = PLUGINS[name].make_booster().boost(make().requires_grad_(requires_grad=False)).model
    seen, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    frozen(seen).square().sum().backward()
    expected(plain).square().sum().backward()
    assert_same_tensors({"x": seen.grad}, {"x": plain.grad}, CLOSE)
    (through,) = torch.autograd.grad(model(seen).square().sum(), seen)
    assert_same_tensors({"x": through}, {"x": plain.grad}, CLOSE)
