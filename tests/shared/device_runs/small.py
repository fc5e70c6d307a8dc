"""A small decoder that computes the same bits each time, and how cases of one rank train it."""

import contextlib
import os
from unittest import mock

import device_smoke
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from booster_runtime.memory import CopyStream

VOCABULARY, LENGTH, SAMPLES = 256, 64, 4
CLOCK_HZ = 1.5e9
"""About what ``torch.cuda._sleep`` counts."""


STRATEGIES = {**device_smoke.CASES, "hybrid": device_smoke.Case("hybrid", {"zero_stage": 1})}
"""Plugins with options, by the names of cases."""


def under(name, **more):
    """Return the keyword arguments of a check under one of `STRATEGIES`."""
    return {"strategy": STRATEGIES[name], **more}


class Layer(nn.Module):
    """Attention and an MLP, by products and sums alone: fused attention adds in any order in backward."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        """Return the next layer's input, of the same shape ``(samples, length, width)``."""
        samples, length, width = x.shape
        q, k, v = (
            each.view(samples, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.first(x)).split(width, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        attended = (scores + mask).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """A language model; forward takes tokens and returns the loss, and no host waits for anything in it."""

    def __init__(self, width=64, num_layers=3, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        mask = torch.full((LENGTH, LENGTH), -1e4).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, tokens):
        """Return the mean loss of predicting each next token of ``(samples, LENGTH)``, the first after the last."""
        x = self.embedding(tokens) + self.positions
        mask = self.mask.to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def make_decoder(setting):
    """Return a decoder on the CPU, the same each time; one large enough to fill streams on a real device."""
    torch.manual_seed(0)
    return Decoder(512, 6, 8) if setting.is_real else Decoder()


def tokens_of(step, device):
    """Return a step's tokens; every other step has the same, so that losses fall."""
    generator = torch.Generator().manual_seed(step % 2)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator).to(device)


def exact_sgd(parameters):
    """Return an optimizer whose steps have the same bits on a host and on a device.

    Products with powers of two are exact, so that it makes no difference where a sum is fused with them.
    """
    return torch.optim.SGD(parameters, lr=2.0**-6, momentum=0.5)


def adamw(parameters):
    """Return an optimizer with two states, whose epsilon exceeds rounding errors of gradients."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)


class Run:
    """The decoder under a plugin.

    Args:
        setting: Where.
        strategy: One of `STRATEGIES`.
        precision: As for ``Booster``.
        make_optimizer: Given the parameters.
        model: Another model than the decoder.
        more: Further options of the plugin.
    """

    def __init__(self, setting, strategy, precision="fp32", *, make_optimizer=exact_sgd, model=None, **more):
        self.setting = setting
        self.booster = strategy.make_booster(setting.device, precision, **more)
        model = make_decoder(setting) if model is None else model
        self.model, optimizer, *_ = self.booster.boost(model, make_optimizer(model.parameters()))
        self.optimizer = optimizer

    def step(self, number):
        """Train a step and return its loss, on the device."""
        loss = self.model(tokens_of(number, self.setting.device))
        self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, steps=5):
        """Return the losses of some steps; the host reads them at the end."""
        losses = [self.step(number) for number in range(steps)]
        return [float(loss) for loss in losses]

    def parameters(self, name="parameters"):
        """Return the parameters by name, on the CPU, by a save."""
        path = self.setting.folder / f"{name}.safetensors"
        self.booster.save_model(self.model, path)
        return load_file(path)


def repeat_bits():
    """Let a device multiply matrices in the same order each time; called before its first product."""
    if torch.cuda.is_available():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def spin(setting, seconds=1e-3):
    """Keep the current stream busy; the simulated device is as late as order allows without it."""
    if setting.is_real:
        torch.cuda._sleep(int(seconds * CLOCK_HZ))


@contextlib.contextmanager
def late_copies(setting, _model=None, seconds=5e-4):
    """Keep copy streams busy before everything that starts in them."""
    inside = CopyStream.own_order

    @contextlib.contextmanager
    def late(copy_stream):
        with inside(copy_stream):
            spin(setting, seconds)
            yield

    with mock.patch.object(CopyStream, "own_order", late):
        yield


@contextlib.contextmanager
def late_compute(setting, model, seconds=5e-4):
    """Keep the stream that computes busy before and after each layer's forward and backward."""

    def wait(*_):
        spin(setting, seconds)

    layers = [module for module in model.modules() if isinstance(module, Layer)]
    assert layers
    handles = []
    for layer in layers:
        handles += [layer.register_forward_pre_hook(wait), layer.register_forward_hook(wait)]
        handles += [layer.register_full_backward_pre_hook(wait)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def assert_same_bits(found, expected, what):
    """Compare tensors by name, bit by bit."""
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    different = {
        name: float((found[name].double() - each.double()).abs().max())
        for name, each in expected.items()
        if not torch.equal(found[name], each)
    }
    assert not different, f"{what}: {len(different)} of {len(expected)} tensors differ: {different}"
