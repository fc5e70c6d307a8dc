"""Modules with awkward structures: nested containers, shared modules, tied weights, odd names and outputs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.own_build import WIDTH, own


class NestedContainers(nn.Module):
    """A ``ModuleDict`` of ``ModuleList`` of ``ParameterDict``, and a ``ParameterList``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                name: nn.ModuleList(
                    nn.ParameterDict({"weight": torch.randn(WIDTH, WIDTH) / 3, "bias": torch.randn(WIDTH)})
                    for _ in range(2)
                )
                for name in ("left", "right")
            }
        )
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH,), 0.5)])

    def forward(self, x: Tensor) -> Tensor:
        for blocks, scale in zip(self.blocks.values(), self.scales, strict=True):
            for block in blocks:
                x = torch.tanh(F.linear(x, block["weight"], block["bias"])) * scale
        return x


class SharedModule(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.LayerNorm(WIDTH)
        self.decoder = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.decoder(self.middle(torch.tanh(self.encoder(x)))))


class TiedHead(nn.Module):
    """A head tied to the embedding, in different submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"table": nn.Embedding(20, WIDTH), "mix": nn.Linear(WIDTH, WIDTH)})
        self.head = nn.Linear(WIDTH, 20)
        self.head.weight = self.body["table"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body["mix"](self.body["table"](tokens))))


class TiedAcrossLayers(nn.Module):
    """Layers of a list with one weight and biases of their own, and a decoder that uses the weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight
        self.back = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x, self.layers[0].weight.t(), self.back)


class TiedBuffer(nn.Module):
    """One buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("same_scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x * self.scale)) * self.same_scale


class OddNames(nn.Module):
    """Names that are words of Python, not ASCII, or have spaces, slashes and dashes."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("class", "größe", "a b", "a/b", "a-b", "0", "weight", "module"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=name == "a/b"))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


class Deep(nn.Module):
    """Modules nested 40 deep."""

    def __init__(self, depth: int = 40) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / 10 + 1)
        self.below = Deep(depth - 1) if depth > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return torch.tanh(x) if self.below is None else self.below(x)


class ManyParameters(nn.Module):
    """Three hundred small parameters of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(1 + number % 3) / 10 + 1 for number in range(300))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale.mean()
        return x


class OneLargeOneSmall(nn.Module):
    """A parameter that is larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.table(tokens)))


@dataclass
class Result:
    """The output of a module."""

    hidden: Tensor
    extra: dict[str, Any]


class DataclassOutput(nn.Module):
    """An output that is a dataclass with nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Result:
        hidden = torch.tanh(self.first(x))
        return Result(hidden, {"outputs": [(self.last(hidden),)], "samples": len(x)})


class DictOutput(DataclassOutput):
    """An output that is a dictionary."""

    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        found = super().forward(x)
        return OrderedDict(hidden=found.hidden, last=found.extra["outputs"][0][0], note="a string")


class KeywordsOnly(nn.Module):
    """A forward with keyword-only and optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, other: Tensor | None = None, **_ignored: Any) -> Tensor:
        x = torch.tanh(self.first(x))
        return x if other is None else x + self.second(other)


class LayersWithAttributes(nn.ModuleList):
    """A ``ModuleList`` with a forward and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.tanh(layer(x)) * self.scale
        return x


class OwnAttributeLookup(nn.Module):
    """A module that forwards unknown attributes to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + self.bias


class ParentReference(nn.Module):
    """Children that know their parent through a list, which registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.child = nn.Linear(WIDTH, WIDTH)
        self.child.parent = [self]  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(self.child.parent[0].inner(x)))  # type: ignore[index]


class HookedModule(nn.Module):
    """Forward hooks that replace inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner.register_forward_pre_hook(_double_inputs)
        self.inner.register_forward_hook(_squash)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


def _double_inputs(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] * 2,)


def _squash(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return torch.tanh(output)


def _hidden_and_last(output: Result, _batch: Any) -> Tensor:
    return (output.hidden.square().mean(1) + output.extra["outputs"][0][0].square().mean(1)).mean()


_TOKENS = batch_of(tokens=numbers(20, 6))

MODELS = (
    own("nested_containers", NestedContainers),
    own("shared_module", SharedModule),
    own("tied_head", TiedHead, batch=_TOKENS),
    own("tied_across_layers", TiedAcrossLayers),
    own("tied_buffer", TiedBuffer),
    own("odd_names", OddNames),
    own("deep", Deep),
    own("many_parameters", ManyParameters),
    own("one_large_one_small", OneLargeOneSmall, batch=batch_of(tokens=numbers(4000, 6))),
    own("dataclass_output", DataclassOutput, loss=_hidden_and_last),
    own("dict_output", DictOutput),
    own("keywords_only", KeywordsOnly, batch=batch_of(x=normal(WIDTH), other=normal(WIDTH), third=normal(2))),
    own("layers_with_attributes", LayersWithAttributes),
    own("own_attribute_lookup", OwnAttributeLookup),
    own("parent_reference", ParentReference),
    own("hooked_module", HookedModule),
)
