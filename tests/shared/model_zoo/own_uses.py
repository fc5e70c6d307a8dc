"""Modules that use their parameters in awkward ways: repeatedly, functionally, without backward, or twice backward."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.own_build import WIDTH, own


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class GradientPenalty(nn.Module):
    """Return the gradient by the input with the output, so that backward runs twice through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = self.inner(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out, slope.square().sum(1, keepdim=True)


class Wrapped(nn.Module):
    """A layer whose weight is computed from other parameters.

    Args:
        change: Registers a parametrization or a hook on the layer.
    """

    def __init__(self, change: Any) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the hooks are deprecated, and still used
            self.inner = change(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(x)))


class Recurrent(nn.Module):
    """A recurrent layer over a sequence.

    Args:
        layer: Returns the layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class CellLoop(nn.Module):
    """A cell that is called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], WIDTH)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


class TokenTable(nn.Module):
    """An embedding table and a layer.

    Args:
        table: The table.
    """

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.table(tokens)))


class FunctionalCall(nn.Module):
    """A layer that is called with its parameters as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * value for name, value in self.inner.named_parameters()}
        return torch.tanh(torch.func.functional_call(self.inner, doubled, (x,)))


class Checkpointed(nn.Module):
    """A block that is recomputed in backward, between two that are not.

    Args:
        use_reentrant: As for `torch.utils.checkpoint.checkpoint`.
    """

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), _mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(checkpoint(self.middle, x, use_reentrant=self.use_reentrant))


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight / 2, gradient.t() @ x / 2


class CustomFunction(nn.Module):
    """An autograd function of our own that saves its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_ScaledProduct.apply(x, self.weight))


class EinsumAttention(nn.Module):
    """Attention over a sequence from parameters without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, 2, 4) / 3)
        self.out = nn.Parameter(torch.randn(2, 4, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("ntc,kchd->knhtd", x, self.qkv)
        weights = torch.einsum("nhtd,nhsd->nhts", q, k).softmax(-1)
        return torch.einsum("nhts,nhsd,hdc->ntc", weights, v, self.out)


class TorchTransformer(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.encoder(x))


class UsedTwice(nn.Module):
    """A weight that its own layer and another function use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) + F.linear(x, self.inner.weight.t()) + self.inner.weight.square().mean()


class NeighboursWeight(nn.Module):
    """A layer that uses the weight of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + F.linear(x, self.layers[number - 1].weight)
        return x


class Unused(nn.Module):
    """A layer and a parameter that forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class DetachedBranch(nn.Module):
    """A branch whose result is computed and detached."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.branch(x).detach()


class AlternatingLayers(nn.Module):
    """Layers that are dropped in turn, the same ones on every rank, as structured dropout of layers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.num_calls % 3
        self.num_calls += 1
        for number, layer in enumerate(self.layers):
            if number != dropped:
                x = x + torch.tanh(layer(x))
        return x


class RoutedExperts(nn.Module):
    """Experts that are separate modules; data selects which of them run, so ranks use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return out * weights[:, None]


class HookedGradient(nn.Module):
    """A parameter with a hook that changes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.register_hook(lambda gradient: 3 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class HookedAccumulation(nn.Module):
    """A parameter with a hook that changes its accumulated gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.register_post_accumulate_grad_hook(_triple)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def _triple(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(3)


class ClampedInForward(nn.Module):
    """A weight that each forward clamps in place, as critics of adversarial networks are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.2, 0.2)
        return self.last(torch.tanh(self.inner(x)))


class MappedOverSamples(nn.Module):
    """A forward for one sample, mapped over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda one: torch.tanh(self.inner(one)))(x)


class InPlace(nn.Module):
    """Functions that work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).add_(self.bias).relu_()).tanh_()


class ScriptedPart(nn.Module):
    """A scripted submodule."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.inner = torch.jit.script(_mlp())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(x)))


class Normalized(nn.Module):
    """Convolutions with a normalization layer.

    Args:
        norm: The normalization layer for 8 channels.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = norm
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))).mean((2, 3))


_HOOKED = "ConfigError: Parameter 'inner.weight' has hooks on its gradient"
_SEQUENCE = batch_of(x=normal(5, WIDTH))
_IMAGE = batch_of(x=normal(3, 6, 6))
_TOKENS = batch_of(tokens=numbers(20, 6))

MODELS = (
    own("gradient_penalty", GradientPenalty),
    own("orthogonal", lambda: Wrapped(parametrizations.orthogonal)),
    own("weight_norm", lambda: Wrapped(parametrizations.weight_norm)),
    own("weight_norm_hook", lambda: Wrapped(nn.utils.weight_norm)),
    own("spectral_norm", lambda: Wrapped(parametrizations.spectral_norm)),
    own("spectral_norm_hook", lambda: Wrapped(nn.utils.spectral_norm)),
    own("lstm", lambda: Recurrent(lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), batch=_SEQUENCE),
    own(
        "lstm_both_ways",
        lambda: Recurrent(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True, proj_size=4)),
        batch=_SEQUENCE,
    ),
    own("gru", lambda: Recurrent(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)), batch=_SEQUENCE),
    own("rnn", lambda: Recurrent(lambda: nn.RNN(WIDTH, WIDTH, batch_first=True)), batch=_SEQUENCE),
    own("gru_cell_loop", CellLoop, batch=_SEQUENCE),
    own(
        "sparse_embedding",
        lambda: TokenTable(nn.Embedding(20, WIDTH, sparse=True)),
        batch=_TOKENS,
        sparse_gradients=True,
        refused={"fsdp": "ConfigError: The gradients of 'table' are sparse"},
    ),
    own(
        "sparse_embedding_bag",
        lambda: TokenTable(nn.EmbeddingBag(20, WIDTH, sparse=True, mode="sum")),
        batch=_TOKENS,
        sparse_gradients=True,
        refused={"fsdp": "ConfigError: The gradients of 'table' are sparse"},
    ),
    own("padded_embedding", lambda: TokenTable(nn.Embedding(20, WIDTH, padding_idx=0)), batch=_TOKENS),
    own(
        "renormalized_embedding",
        lambda: TokenTable(nn.Embedding(20, WIDTH, max_norm=1.0)),
        batch=_TOKENS,
        refused=dict.fromkeys(
            ("ddp", "fsdp", "zero", "gemini", "hybrid"), "ConfigError: Embedding 'table' has `max_norm"
        ),
    ),
    own(
        "clamped_in_forward",
        ClampedInForward,
        refused={
            "fsdp": "ConfigError: Parameter 'inner.weight' was changed in place during forward",
            "gemini": "ConfigError: Parameters were changed by hand, where their values are not kept",
        },
    ),
    own("functional_call", FunctionalCall),
    own("checkpointed", lambda: Checkpointed(use_reentrant=False)),
    own("checkpointed_reentrant", lambda: Checkpointed(use_reentrant=True)),
    own("custom_function", CustomFunction),
    own("einsum_attention", EinsumAttention, batch=_SEQUENCE),
    own("torch_transformer", TorchTransformer, batch=_SEQUENCE, no_effect=("*in_proj_bias",)),
    own("used_twice", UsedTwice),
    own("neighbours_weight", NeighboursWeight),
    own("unused", Unused),
    own("detached_branch", DetachedBranch),
    own("alternating_layers", AlternatingLayers),
    own("routed_experts", RoutedExperts),
    own("hooked_gradient", HookedGradient, refused={"fsdp": _HOOKED}),
    own("hooked_accumulation", HookedAccumulation, refused={"fsdp": _HOOKED}),
    own("mapped_over_samples", MappedOverSamples),
    own("in_place", InPlace),
    own(
        "scripted_part",
        ScriptedPart,
        refused={
            "fsdp": r"ConfigError: The model \(ScriptedPart\) can't be sharded",
            "gemini": "ConfigError: Module 'inner' is scripted",
        },
    ),
    own("batch_norm", lambda: Normalized(nn.BatchNorm2d(8)), batch=_IMAGE, couples_samples=True, double=True),
    own("group_norm", lambda: Normalized(nn.GroupNorm(2, 8)), batch=_IMAGE),
    own(
        "instance_norm",
        lambda: Normalized(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        batch=_IMAGE,
    ),
)
