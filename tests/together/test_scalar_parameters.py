"""Parameters without dimensions, and frozen ones that are expanded, train, save and load as all others do."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from matrix import matrix
from safetensors.torch import load_file
from torch import nn

from booster_core import Booster
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero": LowLevelZeroPlugin,
    "zero whole": lambda: LowLevelZeroPlugin(partition="parameter"),
    "fsdp": TorchFSDPPlugin,
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
    "gemini offloaded": lambda: GeminiPlugin(
        min_chunk_bytes=256, offload_optim_frac=1.0, offload_param_frac=0.5, offload_dir=tempfile.gettempdir()
    ),
    "gemini whole": lambda: GeminiPlugin(min_chunk_bytes=256, partition="parameter"),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1),
    "hybrid zero": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=2),
    "hybrid zero3": lambda: HybridParallelPlugin(zero_stage=3),
}
CLOSE = tolerance_for(torch.float64)


class Contrasting(nn.Module):
    """Scores by a scale of no dimension, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = nn.Linear(6, 8), nn.Linear(6, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.logit_bias = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x):
        rows, columns = self.rows(x), self.columns(x.flip(1))
        return torch.tanh((rows * columns).sum(1) * self.logit_scale.exp() + self.logit_bias)


class Expanded(Contrasting):
    """Has a frozen parameter whose elements are one in memory."""

    def __init__(self):
        super().__init__()
        self.gains = nn.Parameter(torch.full((1,), 0.5).expand(6), requires_grad=False)

    def forward(self, x):
        return super().forward(x * self.gains)


def make(kind):
    torch.manual_seed(4)
    return kind().double()


def batch(step, size):
    return torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def optimizer_over(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train_plainly(kind, size):
    model = make(kind)
    optimizer = optimizer_over(model)
    gradients = []
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, size)).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def train(name, kind, folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    booster = Booster("cpu", plugin=PLUGINS[name]())
    net = make(kind)
    trained = [key for key, p in net.named_parameters() if p.requires_grad]
    model, optimizer, *_ = booster.boost(net, optimizer_over(net))
    gradients = []
    for step in range(4):
        if step == 2:  # the rest is trained by others, which load what these save
            booster.save_model(model, f"{folder}/model", shard=True)
            booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
            net = make(kind)
            with torch.no_grad():
                for parameter in net.parameters():
                    if parameter.requires_grad:
                        parameter.zero_()
            booster = Booster("cpu", plugin=PLUGINS[name]())
            model, optimizer, *_ = booster.boost(net, optimizer_over(net))
            booster.load_model(model, f"{folder}/model")
            booster.load_optimizer(optimizer, f"{folder}/optimizer")
        booster.backward(model(batch(step, size)[rank::size]).square().mean(), optimizer)
        gradients.append({key: full_gradient(booster, model, key) for key in trained})
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(model, f"{folder}/last", use_safetensors=True)
    return gradients


@matrix(["ddp-Contrasting", "hybrid-Contrasting"], name=PLUGINS, kind=[Contrasting, Expanded])
def test_scalar_parameters_train_as_in_one_process(name, kind, tmp_path):
    expected, last = train_plainly(kind, 2)
    for gradients in run_on_ranks(train, 2, name, kind, str(tmp_path)):
        for actual, plain in zip(gradients, expected, strict=True):
            assert_same_tensors(actual, plain, CLOSE)
            assert actual["logit_scale"].shape == ()
    assert_same_tensors(load_file(tmp_path / "last"), last, CLOSE)
