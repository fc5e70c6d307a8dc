"""A small decoder that computes the same bits each time, and how cases of one rank train it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from device_smoke import make_plugin
from torch import nn
from torch.nn import functional

from booster_core import Booster
from booster_runtime.memory import CopyStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from device_runs.cases import Setting

VOCABULARY, LENGTH, SAMPLES = 256, 64, 4
CLOCK_HZ = 1.5e9
"""About what ``torch.cuda._sleep`` counts."""


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "zero 1": ("zero", {"stage": 1}),
    "zero 2": ("zero", {"stage": 2}),
    "zero 2, offload": ("zero", {"stage": 2, "offload": "cpu"}),
    "gemini": ("gemini", {}),
    "gemini, offload": ("gemini", {"offload_param_frac": 1.0, "offload_optim_frac": 1.0}),
    "hybrid": ("hybrid", {"zero_stage": 1}),
}
"""Plugins and their options, by the names of cases."""


def under(name: str, **more: Any) -> dict[str, Any]:
    """Return the keyword arguments of a check under one of `STRATEGIES`."""
    plugin, options = STRATEGIES[name]
    return {"plugin": plugin, "options": options, **more}


class Layer(nn.Module):
    """Attention and an MLP, by products and sums alone: fused attention adds in any order in backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
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

    def __init__(self, width: int = 64, num_layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        mask = torch.full((LENGTH, LENGTH), -1e4).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each next token of ``(samples, LENGTH)``, the first after the last."""
        x = self.embedding(tokens) + self.positions
        mask = self.mask.to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def make_decoder(setting: Setting, seed: int = 0) -> Decoder:
    """Return a decoder on the CPU, the same each time; one large enough to fill streams on a real device."""
    torch.manual_seed(seed)
    return Decoder(512, 6, 8) if setting.is_real else Decoder()


def tokens_of(step: int, device: str) -> Tensor:
    """Return a step's tokens; every other step has the same, so that losses fall."""
    generator = torch.Generator().manual_seed(step % 2)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator).to(device)


def exact_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose steps have the same bits on a host and on a device.

    Products with powers of two are exact, so that it makes no difference where a sum is fused with them.
    """
    return torch.optim.SGD(parameters, lr=2.0**-6, momentum=0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two states, whose epsilon exceeds rounding errors of gradients."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)


class Run:
    """The decoder under a plugin.

    Args:
        setting: Where.
        plugin: As in `device_smoke.PLUGINS`.
        options: Of the plugin.
        precision: As for ``Booster``.
        make_optimizer: Given the parameters.
        model: Another model than the decoder.
    """

    def __init__(
        self,
        setting: Setting,
        plugin: str,
        options: Mapping[str, Any] | None = None,
        precision: str = "fp32",
        *,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        model: nn.Module | None = None,
    ) -> None:
        self.setting = setting
        self.booster = Booster(setting.device, precision, make_plugin(plugin, options or {}))
        model = make_decoder(setting) if model is None else model
        self.model, optimizer, *_ = self.booster.boost(model, make_optimizer(model.parameters()))
        self.optimizer: Any = optimizer

    def step(self, number: int, *, clip: float | None = None) -> Tensor:
        """Train a step and return its loss, on the device."""
        loss = self.model(tokens_of(number, self.setting.device))
        self.booster.backward(loss, self.optimizer)
        if clip is not None:
            self.optimizer.clip_grad_by_norm(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, steps: int = 5, *, clip: float | None = None) -> list[float]:
        """Return the losses of some steps; the host reads them at the end."""
        losses = [self.step(number, clip=clip) for number in range(steps)]
        return [float(loss) for loss in losses]

    def parameters(self, name: str = "parameters") -> dict[str, Tensor]:
        """Return the parameters by name, on the CPU, by a save; see `saved_parameters`."""
        return saved_parameters(self.booster, self.model, self.setting.folder / f"{name}.safetensors")


def saved_parameters(booster: Booster, model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return a boosted model's tensors as it saves them.

    Collective: every rank.
    """
    from safetensors.torch import load_file

    booster.save_model(model, path)
    return load_file(path)


def train_plainly(
    setting: Setting,
    *,
    steps: int = 5,
    autocast: torch.dtype | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    clip: float | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and parameters of the decoder that torch trains by itself."""
    model = make_decoder(setting).to(setting.device)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for number in range(steps):
        with torch.autocast(setting.device, autocast, enabled=autocast is not None):
            loss = model(tokens_of(number, setting.device))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses], {name: each.detach().cpu() for name, each in model.named_parameters()}


def repeat_bits() -> None:
    """Let a device multiply matrices in the same order each time; called before its first product."""
    if torch.cuda.is_available():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def spin(setting: Setting, seconds: float = 1e-3) -> None:
    """Keep the current stream busy; the simulated device is as late as order allows without it."""
    if setting.is_real:
        torch.cuda._sleep(int(seconds * CLOCK_HZ))


@contextlib.contextmanager
def late_copies(setting: Setting, seconds: float = 5e-4) -> Iterator[None]:
    """Keep copy streams busy before everything that starts in them."""
    inside = CopyStream.own_order

    @contextlib.contextmanager
    def late(copy_stream: CopyStream) -> Iterator[None]:
        with inside(copy_stream):
            spin(setting, seconds)
            yield

    with mock.patch.object(CopyStream, "own_order", late):
        yield


@contextlib.contextmanager
def late_compute(setting: Setting, model: nn.Module, seconds: float = 5e-4) -> Iterator[None]:
    """Keep the stream that computes busy before and after each layer's forward and backward."""

    def wait(*_: Any) -> None:
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


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Compare tensors by name, bit by bit."""
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    different = {
        name: float((found[name].double() - each.double()).abs().max())
        for name, each in expected.items()
        if not torch.equal(found[name], each)
    }
    assert not different, f"{what}: {len(different)} of {len(expected)} tensors differ: {different}"
