"""Models that return objects: dataclasses, whose tensors pytree does not see, and plain classes, to the criterion."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, noise, train_boosted
from matrix import matrix
from residual_stack import SPLIT, Layer
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks
from booster_zero import LowLevelZeroPlugin


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


@dataclasses.dataclass
class Unopened(Hidden):
    """Hidden states that torch's pytree does not open."""


class Plain:
    """The same, of no known kind."""

    def __init__(self, logits, hidden, index):
        self.logits, self.hidden, self.index = logits, hidden, index


class Block(Layer):
    """A layer that returns a dataclass as well."""

    def forward(self, x):
        return Unopened(super().forward(x), x.mean())


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


SETTINGS = {
    "ddp": Setting(TorchDDPPlugin),
    "ddp-static": Setting(TorchDDPPlugin, {"static_graph": True}),
    "ddp-unused": Setting(TorchDDPPlugin, {"find_unused_parameters": True}),
    "fsdp": Setting(TorchFSDPPlugin),
    "fsdp-units": Setting(TorchFSDPPlugin, {"unit_classes": ["Layer"]}),
    "fsdp-blocks": Setting(TorchFSDPPlugin, {"unit_classes": ["Block"]}),
    "zero1": Setting(LowLevelZeroPlugin, {"overlap_allgather": True}),
    "zero2": Setting(LowLevelZeroPlugin, {"stage": 2}),
    "gemini": Setting(GeminiPlugin, {"min_chunk_bytes": 256}),
    "tp": Setting(HybridParallelPlugin, {"tp_size": 2, "custom_policy": SPLIT}),
    "tp-zero": Setting(HybridParallelPlugin, {"tp_size": 2, "zero_stage": 1, "custom_policy": SPLIT}, 4),
}
KINDS = {"dataclass": Result, "registered": Registered, "unnamed": Unnamed, "class": Plain}
REFUSED = {("ddp-static", "dataclass"), ("ddp-static", "class")}
TRAINING = [(name, kind) for name in SETTINGS for kind in KINDS if (name, kind) not in REFUSED]


def loss_of(kind, result, x):
    assert type(result) is kind
    assert result.logits.dtype == result.hidden.states.dtype == torch.float32
    own = nn.functional.cross_entropy(result.logits, x[:, :3].argmax(1))
    return own + result.hidden.states.square().mean() + result.hidden.scale


def case_of(kind, layer=Layer):
    return Case(build=partial(Net, kind, layer), batch=noise(4, 8), loss=partial(loss_of, kind), steps=2)


@pytest.mark.parametrize(("plugin", "kind"), sorted(REFUSED))
def test_outputs_that_a_static_graph_of_ddp_can_not_follow_are_refused(plugin, kind):
    message = rf"returns a `{KINDS[kind].__name__}`, in which DDP finds no tensors\. `static_graph=True` needs them"
    expect_on_ranks(ConfigError, message, train_boosted, 2, case_of(KINDS[kind]), SETTINGS[plugin])


@matrix(1, **{"plugin, kind": TRAINING})
def test_losses_of_objects_train_as_one_process(plugin, kind):
    layer = Block if plugin == "fsdp-blocks" else Layer
    assert_equals_one_process(case_of(KINDS[kind], layer), SETTINGS[plugin])
