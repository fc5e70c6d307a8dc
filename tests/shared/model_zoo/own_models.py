"""Small modules of our own: awkward parameters and buffers, and awkward uses of them.

Shapes, formats, layouts, and state that is no tensor; uses that are repeated, functional, without backward, or twice
backward. They take a batch ``x`` of shape ``(samples, 8)``.
"""

import warnings
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from torch.nn.utils import parametrizations

from model_zoo.fields import batch_of, normal, numbers
from model_zoo.registry import ZooModel

WIDTH = 8


def own(name, build, **more):
    """Return the entry of a module; a batch of normally distributed ``x`` unless another is given."""
    return ZooModel(name=f"own/{name}", build=build, **{"batch": batch_of(x=normal(WIDTH)), **more})


def _named(**layers):
    """Return layers one after the other, whose input is called ``input``."""
    return nn.Sequential(OrderedDict(layers))


# ---- parameters and buffers


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.rotation = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x):
        turned = self.inner(x).to(self.rotation.dtype) @ self.rotation
        return torch.cat([turned.real, torch.tanh(turned.imag)], dim=1)


class IntegerWeights(nn.Module):
    """Weights in an integer buffer with trained scales, as quantized layers have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("is_kept", torch.rand(WIDTH) > 0.25)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.01))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = F.linear(x, self.weight.to(x.dtype) * self.scale)
        return self.out(torch.tanh(x) * self.is_kept)


class IntegerParameter(nn.Module):
    """A frozen integer parameter, as quantized layers have."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(torch.tanh(F.linear(x, self.weight.to(x.dtype) * 0.01)))


class ExtraState(nn.Module):
    """State that is no tensor, and changes in forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0

    def get_extra_state(self):
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state):
        self.num_calls = state["num_calls"]

    def forward(self, x):
        self.num_calls += 1
        return torch.tanh(self.inner(x))


class TensorExtraState(ExtraState):
    """Extra state that is a tensor."""

    def get_extra_state(self):
        return torch.tensor(self.num_calls)

    def set_extra_state(self, state):
        self.num_calls = int(state)


class PlainList(nn.Module):
    """Tensors in a plain list, which are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.constants = [nn.Parameter(torch.randn(WIDTH), requires_grad=False) for _ in range(2)]

    def forward(self, x):
        return torch.tanh(self.inner(x * self.constants[0].to(x.dtype))) * self.constants[1].to(x.dtype)


class NonPersistentBuffers(nn.Module):
    """Buffers that are not saved, one computed from random numbers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("basis", torch.randn(WIDTH, WIDTH), persistent=False)
        self.register_buffer("position", torch.arange(WIDTH), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        return torch.tanh(self.inner(x) @ self.basis)[:, self.position]


class TransposedParameter(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight))


class FrozenBackbone(nn.Module):
    """A backbone without gradients, run under ``no_grad``, and a trained head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.backbone.requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return torch.tanh(self.head(x))


# ---- uses


def _mlp():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Recurrent(nn.Module):
    """A recurrent layer over a sequence.

    Args:
        layer: Returns the layer.
    """

    def __init__(self, layer):
        super().__init__()
        self.inner = layer()

    def forward(self, x):
        return self.inner(x)[0]


class CellLoop(nn.Module):
    """A cell that is called in a loop."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], WIDTH)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


class DetachedBranch(nn.Module):
    """A branch whose result is computed and detached."""

    def __init__(self):
        super().__init__()
        self.inner, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.branch(x).detach()


class HookedAccumulation(nn.Module):
    """A parameter with a hook that changes its accumulated gradient."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.register_post_accumulate_grad_hook(_triple)

    def forward(self, x):
        return torch.tanh(self.inner(x))


def _triple(parameter):
    if parameter.grad is not None:
        parameter.grad.mul_(3)


class ClampedInForward(nn.Module):
    """A weight that each forward clamps in place, as critics of adversarial networks are."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-0.2, 0.2)
        return self.last(torch.tanh(self.inner(x)))


class MappedOverSamples(nn.Module):
    """A forward for one sample, mapped over the batch."""

    def __init__(self):
        super().__init__()
        self.inner = _mlp()

    def forward(self, x):
        return torch.func.vmap(lambda one: torch.tanh(self.inner(one)))(x)


class InPlace(nn.Module):
    """Functions that work in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.last(self.first(x).add_(self.bias).relu_()).tanh_()


class ScriptedPart(nn.Module):
    """A scripted submodule."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.inner = torch.jit.script(_mlp())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(x)))


def _wrapped(change):
    """Return layers, of which the first computes its weight from other parameters, by a parametrization or a hook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hooks are deprecated, and still used
        inner = change(nn.Linear(WIDTH, WIDTH))
    return _named(inner=inner, tanh=nn.Tanh(), last=nn.Linear(WIDTH, WIDTH))


def _looked_up(table):
    """Return an embedding table and a layer."""
    return _named(table=table, inner=nn.Linear(WIDTH, WIDTH), tanh=nn.Tanh())


def _convolutions(norm, *, bias=False):
    """Return convolutions, a layer of 8 channels between them."""
    ends = {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    first = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
    return _named(first=first, norm=norm, tanh=nn.Tanh(), last=nn.Conv2d(8, 4, 3), **ends)


def _channels_last():
    """Return convolutions whose weights have the memory format ``channels_last``."""
    return _convolutions(nn.Identity(), bias=True).to(memory_format=torch.channels_last)


def _prime_sizes():
    """Return layers whose sizes no number of ranks divides."""
    return _named(first=nn.Linear(WIDTH, 13), tanh=nn.Tanh(), norm=nn.LayerNorm(13), last=nn.Linear(13, 1))


_NOT_COMPLEX = r"ConfigError: Parameter 'rotation' is of torch.complex64; only floating parameters can be sharded"
_HOOKED = "ConfigError: Parameter 'inner.weight' has hooks on its gradient"
_SEQUENCE = batch_of(x=normal(5, WIDTH))
_ROWS = batch_of(input=normal(WIDTH))
_IMAGE = batch_of(input=normal(3, 6, 6))
_TOKENS = batch_of(input=numbers(20, 6))

MODELS = (
    own("complex_parameter", Complex, refused=dict.fromkeys(("zero", "gemini", "hybrid"), _NOT_COMPLEX)),
    own("integer_weights", IntegerWeights),
    own("integer_parameter", IntegerParameter),
    own("extra_state", ExtraState),
    own("tensor_extra_state", TensorExtraState),
    own("plain_list", PlainList),
    own("non_persistent_buffers", NonPersistentBuffers),
    own("transposed_parameter", TransposedParameter),
    own("channels_last", _channels_last, batch=_IMAGE),
    own("prime_sizes", _prime_sizes, batch=_ROWS),
    own("frozen_backbone", FrozenBackbone),
    own("orthogonal", lambda: _wrapped(parametrizations.orthogonal), batch=_ROWS),
    own("weight_norm_hook", lambda: _wrapped(nn.utils.weight_norm), batch=_ROWS),
    own("spectral_norm", lambda: _wrapped(parametrizations.spectral_norm), batch=_ROWS),
    own("spectral_norm_hook", lambda: _wrapped(nn.utils.spectral_norm), batch=_ROWS),
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
        lambda: _looked_up(nn.Embedding(20, WIDTH, sparse=True)),
        batch=_TOKENS,
        sparse_gradients=True,
        refused={"fsdp": "ConfigError: The gradients of 'table' are sparse"},
    ),
    own(
        "sparse_embedding_bag",
        lambda: _looked_up(nn.EmbeddingBag(20, WIDTH, sparse=True, mode="sum")),
        batch=_TOKENS,
        sparse_gradients=True,
        refused={"fsdp": "ConfigError: The gradients of 'table' are sparse"},
    ),
    own("padded_embedding", lambda: _looked_up(nn.Embedding(20, WIDTH, padding_idx=0)), batch=_TOKENS),
    own(
        "renormalized_embedding",
        lambda: _looked_up(nn.Embedding(20, WIDTH, max_norm=1.0)),
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
    own("detached_branch", DetachedBranch),
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
    own("batch_norm", lambda: _convolutions(nn.BatchNorm2d(8)), batch=_IMAGE, double=True),
    own("group_norm", lambda: _convolutions(nn.GroupNorm(2, 8)), batch=_IMAGE),
    own(
        "instance_norm",
        lambda: _convolutions(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        batch=_IMAGE,
    ),
)
