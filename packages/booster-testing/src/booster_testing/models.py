"""Tiny models with the features of large ones, such as tied weights, unused parameters and running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TinyMLP(nn.Module):
    """Two linear layers; input of shape ``(N, 8)``, output ``(N, 4)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of shape ``(N, 4)``."""
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class TinyMixedBag(nn.Module):
    """A language model of a few hundred parameters with a tied head and repeated, unused and frozen layers.

    Input: token numbers below 16, shape ``(N, T)``. Output: logits, shape ``(N, T, 16)``.

    Args:
        unused: Have a layer that forward never calls.
        frozen: Have a layer whose parameters don't require gradients.
    """

    scale: Tensor

    def __init__(self, *, unused: bool = True, frozen: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.repeated = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8) if frozen else None
        self.unused = nn.Linear(8, 8) if unused else None
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if self.frozen is not None:
            self.frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape ``(N, T, 16)``."""
        x = self.embed(tokens)
        for _ in range(2):
            x = x + torch.tanh(self.repeated(self.norm(x)))
        if self.frozen is not None:
            x = x + self.frozen(x)
        out: Tensor = self.head(x * self.scale)
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, shape ``(N, T, 8)``."""
        out: Tensor = self.embedding(tokens)
        return out


class TinyStack(nn.Module):
    """A language model of four equal layers in sequence between an embedding and a head that are tied.

    Layers take a tensor and a mask and return a tensor; one layer is frozen. Input: token numbers below 16, shape
    ``(N, T)``. Output: logits, shape ``(N, T, 16)``.

    Args:
        unused: Have a layer that forward never calls.
    """

    def __init__(self, *, unused: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(_TinyLayer() for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(8, 8) if unused else None
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(8))
        self.layers[1].requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape ``(N, T, 16)``."""
        mask = (tokens != 0).unsqueeze(-1)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask=mask)
        out: Tensor = self.head(self.norm(x) * self.scale)
        return out


class _TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * mask


class TinyStateful(TinyMixedBag):
    """`TinyMixedBag` with running statistics, dropout, extra state, and a parameter of another dtype.

    Args:
        dropout: Probability of dropout.
    """

    def __init__(self, *, dropout: float = 0.5) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(8)
        self.gain = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.counter = ForwardCounter()
        self.drop = nn.Dropout(dropout)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return normalized embeddings, shape ``(N, T, 8)``."""
        x = self.counter(self.embedding(tokens))
        normalized: Tensor = self.statistics(x.flatten(0, 1)).view_as(x)
        return self.drop(normalized * self.gain.to(x.dtype))  # type: ignore[no-any-return]


class TinyRouted(TinyMixedBag):
    """`TinyMixedBag` with two parameters of one shape, of which each sample uses the one that its first token names.

    A rank whose samples all begin with token 0 gives `first` a gradient and `other` none; else it is the other way, if
    none begins with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 8))
        self.other = nn.Parameter(torch.linspace(1, 2, 8))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, to which each sample adds its parameter, shape ``(N, T, 8)``."""
        x = super().embed(tokens)
        is_first = (tokens[:, :1] == 0).unsqueeze(-1)
        if bool(is_first.any()):
            x = x + is_first * self.first
        if not bool(is_first.all()):
            x = x + is_first.logical_not() * self.other
        return x


class ForwardCounter(nn.Module):
    """Returns its input, and counts training forwards in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, of any shape."""
        self.count += self.training
        return x

    def get_extra_state(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Set the count."""
        self.count = state["count"]


def tiny_llama(**changes: Any) -> nn.Module:
    """Return a transformers Llama with random weights and two layers; ``changes`` go to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    return model
