"""A small training, run with plain torch in one process and under a plugin on several ranks, to compare the two.

`train_plainly` uses only torch; `train_boosted` runs on each rank with its part of the same batches. Both return
losses, gradients and parameters by name.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_core import Booster
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_core.ranks import DistCoordinator
from booster_runtime.lazy import LazyInitContext
from booster_testing.models import TinyMixedBag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

    from booster_core.plugin import Plugin

_LENGTH = 6
_FP16_SCALE = 256.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training that can be run with plain torch or boosted.

    Args:
        plugin_class: The plugin's class.
        options: Arguments of its constructor.
        precision: As for ``Booster(mixed_precision=...)``.
        optimizer: ``"sgd"``, ``"adamw"``, ``"adafactor"`` or ``"muon"``.
        micro_batches: Samples per rank in each micro-batch of a step; all but the last run under ``no_sync``.
        steps: Number of optimizer steps.
        max_norm: Clip gradients by norm.
        clip_value: Clip gradients by value.
        unused: Give the model a layer that forward never calls.
        lazy: Build the boosted model under `LazyInitContext`.
    """

    plugin_class: type[Plugin]
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    optimizer: str = "adamw"
    micro_batches: tuple[int, ...] = (4,)
    steps: int = 3
    max_norm: float | None = None
    clip_value: float | None = None
    unused: bool = True
    lazy: bool = False

    @property
    def loss_scale(self) -> LossScaleConfig | None:
        """A loss scale at which nothing overflows in this model, so that no step is skipped."""
        return LossScaleConfig(initial_scale=_FP16_SCALE) if self.precision == "fp16" else None

    def make_booster(self) -> Booster:
        """Return a Booster with a new plugin."""
        policy = None if self.precision is None else PrecisionPolicy.parse(self.precision, loss_scale=self.loss_scale)
        return Booster("cpu", policy, self.plugin_class(**self.options))

    def make_model(self, *, lazy: bool = False) -> TinyMixedBag:
        """Return the model, the same each time."""
        with torch.random.fork_rng(devices=[]), LazyInitContext() if lazy else contextlib.nullcontext():
            torch.manual_seed(7)
            return TinyMixedBag(unused=self.unused)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over the model, in two groups with different settings."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() == 2]
        others = [parameter for parameter in trained if parameter.dim() != 2]
        if self.optimizer == "muon":
            whole: list[dict[str, Any]] = [{"params": matrices[:1]}, {"params": matrices[1:], "lr": 0.01}]
            return torch.optim.Muon(whole, lr=0.02)
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]
        makers: dict[str, Callable[[], Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
            "adamw": lambda: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
            "adafactor": lambda: torch.optim.Adafactor(groups, lr=0.01, weight_decay=0.1),
        }
        return makers[self.optimizer]()

    def batch(self, step: int, micro: int, world_size: int) -> Tensor:
        """Return the global micro-batch of tokens, shape ``(samples, 6)``."""
        generator = torch.Generator().manual_seed(1000 * step + micro)
        return torch.randint(16, (self.micro_batches[micro] * world_size, _LENGTH), generator=generator)


@dataclass
class Trained:
    """Results of a training, with one entry per step in each list.

    Attributes:
        losses: Loss of each step, over all micro-batches of this process.
        gradients: Gradient by parameter name, before clipping.
        norms: Results of ``clip_grad_by_norm``.
        parameters: Parameters and buffers by name, after each step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)


def summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the next-token loss, a mean over positions and a sum over samples."""
    losses = nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(tokens), -1).mean(1).sum()


def train_plainly(training: Training, world_size: int) -> Trained:
    """Train in this process on whole batches, with plain torch.

    Collective: none.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.precision or "")
    scale = _FP16_SCALE if training.precision == "fp16" else 1.0
    model = training.make_model()
    optimizer = training.make_optimizer(model)
    trained = Trained()
    samples = sum(training.micro_batches) * world_size
    for step in range(training.steps):
        total = 0.0
        for micro in range(len(training.micro_batches)):
            tokens = training.batch(step, micro, world_size)
            with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
                logits = model(tokens)
            loss = summed_loss(logits, tokens) / samples
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        trained.losses.append(total)
        named = dict(model.named_parameters())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        trained.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        if training.max_norm is not None:
            trained.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)))
        if training.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), training.clip_value)
        optimizer.step()
        optimizer.zero_grad()
        trained.parameters.append({n: t.detach().clone() for n, t in model.state_dict().items()})
    return trained


def train_boosted(training: Training) -> Trained:
    """Train under the plugin on this rank's part of each micro-batch.

    Collective: every rank of the world.
    """
    rank, world_size = DistCoordinator().rank, DistCoordinator().world_size
    booster = training.make_booster()
    original = training.make_model(lazy=training.lazy)
    model, optimizer, *_ = booster.boost(original, training.make_optimizer(original))
    names = [name for name, parameter in original.named_parameters() if parameter.requires_grad]
    assert optimizer is not None, "boost returned what it was given"
    trained = Trained()
    samples = sum(training.micro_batches)
    for step in range(training.steps):
        total = 0.0
        last = len(training.micro_batches) - 1
        for micro in range(last + 1):
            tokens = training.batch(step, micro, world_size)[rank::world_size]
            with booster.no_sync(model, optimizer) if micro < last else contextlib.nullcontext():
                loss = summed_loss(model(tokens), tokens) / samples
                booster.backward(loss, optimizer)
            total += float(loss.detach())
        trained.losses.append(total)
        gradients = {name: booster.full_gradient(model, name) for name in names}
        trained.gradients.append({name: grad for name, grad in gradients.items() if grad is not None})
        wrapper: Any = optimizer
        if training.max_norm is not None:
            trained.norms.append(float(wrapper.clip_grad_by_norm(training.max_norm)))
        if training.clip_value is not None:
            wrapper.clip_grad_by_value(training.clip_value)
        optimizer.step()
        optimizer.zero_grad()
        trained.parameters.append(whole_model(booster, model))
    return trained


def whole_model(booster: Booster, model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers, whole and by name, on every rank.

    Collective: every rank of the world.
    """
    adapter = booster.state_adapter(model)
    own = [
        (shard.name, shard.global_shape, shard.box, shard.flat_range, shard.data.detach().clone())
        for shard in adapter.model_shards()
        if shard.is_owner
    ]
    pieces: dict[str, list[Any]] = defaultdict(list)
    for of_rank in DistCoordinator().all_gather_object(own):
        for piece in of_rank:
            pieces[piece[0]].append(piece)
    whole = {name: _assemble(held) for name, held in pieces.items()}
    whole.update({name: whole[first] for name, first in adapter.tied_names().items()})
    return whole


def _assemble(pieces: Sequence[Any]) -> Tensor:
    """Assemble a tensor from the parts that ranks own, and check that they cover it exactly once."""
    _, shape, _, _, first = pieces[0]
    whole = torch.zeros(shape, dtype=first.dtype)
    covered = torch.zeros(shape, dtype=torch.int32)
    for _, _, box, (start, stop), data in pieces:
        window = tuple(slice(low, high) for low, high in box)
        for target, values in ((whole, data.flatten()), (covered, torch.ones(data.numel(), dtype=torch.int32))):
            part = target[window].flatten()
            part[start:stop] += values
            target[window] = part.view(target[window].shape)
    assert bool((covered == 1).all()), f"owned shards do not cover {pieces[0][0]} exactly once"
    return whole
