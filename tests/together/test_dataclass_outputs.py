"""Models that return objects: dataclasses, whose tensors pytree does not see, and plain classes, to the criterion."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from matrix import matrix
from torch import nn
from torch.utils import _pytree as pytree

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_runtime import full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

CLOSE = tolerance_for(torch.float32)


@dataclasses.dataclass
class Hidden:
    states: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass
class Result:
    """What the models return: nested, and with a tensor that has no gradient."""

    logits: torch.Tensor
    hidden: Hidden
    index: torch.Tensor


@dataclasses.dataclass
class Registered(Result):
    """The same, which torch's pytree opens."""


@dataclasses.dataclass
class Unnamed(Result):
    """The same, which torch's pytree opens without names for its parts: diffusers registers its outputs so."""


pytree.register_dataclass(Hidden)
pytree.register_dataclass(Registered)
pytree._private_register_pytree_node(
    Unnamed, lambda each: ([each.logits, each.hidden, each.index], None), lambda parts, _: Unnamed(*parts)
)


class Plain:
    """The same, of no known kind."""

    def __init__(self, logits, hidden, index):
        self.logits, self.hidden, self.index = logits, hidden, index


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Block(Layer):
    """A layer that returns a dataclass as well."""

    def forward(self, x):
        return Hidden(super().forward(x), x.mean())


class Net(nn.Module):
    """Returns logits, and hidden states of which the loss has a term of their own."""

    def __init__(self, kind, layer=Layer):
        super().__init__()
        self.kind = kind
        self.entry = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
            x = x.states if isinstance(x, Hidden) else x
        return self.kind(self.head(x), Hidden(x, x.square().mean()), x.detach().argmax(-1))


POLICY = ShardingPolicy(
    rules=(ModuleRule("layers.*.up", Style.COLUMN), ModuleRule("layers.*.down", Style.ROW)), layers=("layers",)
)
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "ddp-static": lambda: TorchDDPPlugin(static_graph=True),
    "ddp-unused": lambda: TorchDDPPlugin(find_unused_parameters=True),
    "fsdp": TorchFSDPPlugin,
    "fsdp-units": lambda: TorchFSDPPlugin(unit_classes=["Layer"]),
    "fsdp-blocks": lambda: TorchFSDPPlugin(unit_classes=["Block"]),
    "zero1": lambda: LowLevelZeroPlugin(overlap_allgather=True),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
    "tp": lambda: HybridParallelPlugin(tp_size=2, custom_policy=POLICY),
    "tp-zero": lambda: HybridParallelPlugin(tp_size=2, zero_stage=1, custom_policy=POLICY),
}
WORLD_SIZES = {"tp-zero": 4}
KINDS = {"dataclass": Result, "registered": Registered, "unnamed": Unnamed, "class": Plain}


def loss_of(result, targets):
    own = nn.functional.cross_entropy(result.logits, targets)
    return own + result.hidden.states.square().mean() + result.hidden.scale


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)


def make(kind, layer):
    torch.manual_seed(5)
    return Net(kind, layer)


def plainly(kind, layer, replicas):
    """Return each step's gradients of one process."""
    model = make(kind, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(2):
        for replica in range(replicas):
            x, targets = batch(10 * step + replica)
            (loss_of(model(x), targets) / replicas).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def boosted(plugin, kind, layer, precision=None):
    model = make(kind, layer)
    names = [name for name, _ in model.named_parameters()]
    booster = Booster("cpu", precision, PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    replica, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    gradients = []
    for step in range(2):
        x, targets = batch(10 * step + replica)
        result = model(x)
        assert type(result) is kind
        assert result.logits.dtype == result.hidden.states.dtype == torch.float32
        booster.backward(loss_of(result, targets), optimizer)
        gradients.append({name: full_gradient(booster, model, name) for name in names})
        optimizer.step()
        optimizer.zero_grad()
    return gradients


REFUSED = {("ddp-static", "dataclass"), ("ddp-static", "class")}


@pytest.mark.parametrize(("plugin", "kind"), sorted(REFUSED))
def test_outputs_that_a_static_graph_of_ddp_can_not_follow_are_refused(plugin, kind):
    message = rf"returns a `{KINDS[kind].__name__}`, in which DDP finds no tensors\. `static_graph=True` needs them"
    expect_on_ranks(ConfigError, message, boosted, 2, plugin, KINDS[kind], Layer)


TRAINING = [(plugin, kind) for plugin in PLUGINS for kind in KINDS if (plugin, kind) not in REFUSED]


@matrix(1, **{"plugin, kind": TRAINING})
def test_losses_of_objects_train_as_one_process(plugin, kind):
    layer = Block if plugin == "fsdp-blocks" else Layer
    expected = plainly(KINDS[kind], layer, 1 if plugin == "tp" else 2)
    for gradients in run_on_ranks(boosted, WORLD_SIZES.get(plugin, 2), plugin, KINDS[kind], layer):
        for found, told in zip(gradients, expected, strict=True):
            assert_same_tensors(found, told, CLOSE)
