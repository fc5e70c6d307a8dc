"""Modules with awkward parameters and buffers: shapes, dtypes, layouts, and state that is no tensor."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from model_zoo.fields import batch_of, normal
from model_zoo.own_build import WIDTH, own


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


class ChannelsLast(nn.Module):
    """Convolutions whose weights have the memory format ``channels_last``."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last)
        return self.last(torch.tanh(self.first(x))).mean((2, 3))


class PrimeSizes(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 13)
        self.norm = nn.LayerNorm(13)
        self.last = nn.Linear(13, 1)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


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


_NOT_COMPLEX = r"ConfigError: Parameter 'rotation' is of torch.complex64; only floating parameters can be sharded"

MODELS = (
    own("complex_parameter", Complex, refused=dict.fromkeys(("zero", "gemini", "hybrid"), _NOT_COMPLEX)),
    own("integer_weights", IntegerWeights),
    own("integer_parameter", IntegerParameter),
    own("extra_state", ExtraState),
    own("tensor_extra_state", TensorExtraState),
    own("plain_list", PlainList),
    own("non_persistent_buffers", NonPersistentBuffers),
    own("transposed_parameter", TransposedParameter),
    own("channels_last", ChannelsLast, batch=batch_of(x=normal(3, 6, 6))),
    own("prime_sizes", PrimeSizes),
    own("frozen_backbone", FrozenBackbone),
)
