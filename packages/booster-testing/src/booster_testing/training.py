"""A small training, run with plain torch in one process and under a plugin on several ranks, to compare the two.

`PlainRun` uses only torch; `BoostedRun` runs on each rank with its part of the same batches. What happens between two
steps is a loop of `booster_testing.loops`, which is the same for both.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from booster_core import Booster
from booster_core.precision import LossScaleConfig, PrecisionPolicy
from booster_core.ranks import DistCoordinator
from booster_runtime import full_gradient
from booster_runtime.lazy import LazyInitContext
from booster_testing.loops import LOOPS
from booster_testing.models import TinyMixedBag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from booster_core.plugin import Plugin
    from booster_core.state import TensorShard

_LENGTH = 6
_FP16_SCALE = 256.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training that can be run with plain torch or boosted.

    Args:
        plugin_class: The plugin's class.
        options: Arguments of its constructor.
        device: Where the model runs.
        model_factory: Returns the model, called without arguments; `TinyMixedBag` if left out. The model takes token
            numbers below 16, shape ``(N, T)``, and returns logits of at least 16 classes, or an output that has them as
            ``logits``.
        precision: As for ``Booster(mixed_precision=...)``.
        optimizer: ``"sgd"``, ``"adamw"``, ``"adafactor"`` or ``"muon"``.
        micro_batches: Samples per rank in each micro-batch of a step.
        loop: What happens between two steps, a name in `booster_testing.loops.LOOPS`; by default all micro-batches but
            the last run under ``no_sync``.
        routed: Let the samples of one rank, another one in each step, begin with token 0, and no other sample: a model
            that chooses parameters by it uses some on this rank only.
        same_batches: Give every rank the whole of each batch, so that BatchNorm sees what it sees in one process.
        steps: Number of optimizer steps.
        max_norm: Clip gradients by norm.
        norm_type: Order of that norm.
        clip_value: Clip gradients by value.
        set_to_none: Argument of ``zero_grad``.
        unused: Give the model a layer that forward never calls.
        lazy: Build the boosted model under `LazyInitContext`.
    """

    plugin_class: type[Plugin]
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    model_factory: Callable[[], nn.Module] | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    micro_batches: tuple[int, ...] = (4,)
    loop: str = "micro-batches"
    routed: bool = False
    same_batches: bool = False
    steps: int = 3
    max_norm: float | None = None
    norm_type: float = 2.0
    clip_value: float | None = None
    set_to_none: bool = True
    unused: bool = True
    lazy: bool = False

    @property
    def loss_scale(self) -> LossScaleConfig | None:
        """A loss scale at which nothing overflows in this model, so that no step is skipped."""
        return LossScaleConfig(initial_scale=_FP16_SCALE) if self.precision == "fp16" else None

    def make_booster(self) -> Booster:
        """Return a Booster with a new plugin."""
        policy = None if self.precision is None else PrecisionPolicy.parse(self.precision, loss_scale=self.loss_scale)
        return Booster(self.device, policy, self.plugin_class(**self.options))

    def make_model(self, *, lazy: bool = False) -> nn.Module:
        """Return the model, the same each time."""
        with torch.random.fork_rng(devices=[]), LazyInitContext() if lazy else contextlib.nullcontext():
            torch.manual_seed(7)
            return TinyMixedBag(unused=self.unused) if self.model_factory is None else self.model_factory()

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
        samples = self.micro_batches[micro % len(self.micro_batches)] * world_size
        generator = torch.Generator().manual_seed(1000 * step + micro)
        tokens = torch.randint(16, (samples, _LENGTH), generator=generator)
        if self.routed:
            tokens[:, 0] = torch.where(torch.arange(samples) % world_size == step % world_size, 0, 1)
        return tokens


@dataclass
class Trained:
    """Results of a training; lists have one entry per step.

    Attributes:
        losses: Loss of each step, over all micro-batches of this process.
        gradients: Gradient by parameter name, before clipping.
        norms: Results of ``clip_grad_by_norm``.
        parameters: Parameters and buffers by name, after the last step.
        state: Tensors of the optimizer's state by ``name/state``, after the last step; without scalars.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the next-token loss, a mean over positions and a sum over samples."""
    losses = nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(tokens), -1).mean(1).sum()


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model's outputs."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


class PlainRun:
    """A training in this process on whole batches, with plain torch.

    Args:
        training: The settings.
        world_size: Number of ranks of the boosted run that it is compared with.
    """

    is_boosted = False

    def __init__(self, training: Training, world_size: int) -> None:
        self.training = training
        self.world_size = world_size
        self.trained = Trained()
        self._total = 0.0
        self._parts = 1 if training.same_batches else world_size
        self._samples = sum(training.micro_batches) * self._parts
        self._start()

    def _start(self) -> None:
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self._dtype = dtypes.get(self.training.precision or "")
        self._scale = _FP16_SCALE if self.training.precision == "fp16" else 1.0
        self.device = torch.device(self.training.device)
        self.model: Any = self.training.make_model().to(self.device)
        self.optimizer: Any = self.training.make_optimizer(self.model)

    def tokens(self, step: int, micro: int = 0) -> Tensor:
        """Return the tokens of a micro-batch."""
        return self.training.batch(step, micro, self._parts).to(self.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the model's logits."""
        with torch.autocast(self.device.type, dtype=self._dtype) if self._dtype else contextlib.nullcontext():
            return logits_of(self.model(tokens))

    def loss(self, step: int, micro: int = 0) -> Tensor:
        """Return the loss of a micro-batch as its part of the step's mean."""
        tokens = self.tokens(step, micro)
        return self.loss_of(self.forward(tokens), tokens)

    def loss_of(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of a micro-batch's logits as its part of the step's mean."""
        return summed_loss(logits, tokens) / self._samples

    def second_loss_of(self, logits: Tensor) -> Tensor:
        """Return another loss of the same logits."""
        return logits.float().square().mean((1, 2)).sum() / self._samples

    def backward(self, loss: Tensor, *, retain_graph: bool = False, directly: bool = False) -> None:
        """Run backward from a loss; ``directly`` by the loss's own method."""
        del directly
        self._total += float(loss.detach())
        (loss * self._scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for all but the last micro-batch."""
        return contextlib.nullcontext()

    def measure_norm(self) -> None:
        """Read the norm of the gradients that are there, without a change."""

    def step(self, *, is_last: bool) -> None:
        """Clip, step and drop the gradients; record what `Trained` lists."""
        trained, training = self.trained, self.training
        trained.losses.append(self._total)
        self._total = 0.0
        trained.gradients.append(self._gradients())
        if training.max_norm is not None:
            trained.norms.append(float(self._clip_by_norm(training.max_norm, training.norm_type)))
        if training.clip_value is not None:
            self._clip_by_value(training.clip_value)
        self.optimizer.step()
        self._zero_grad()
        if is_last:
            trained.parameters = self._parameters()
            trained.state = {key: tensor for key, tensor in self._state().items() if tensor.numel() > 1}

    def _zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=self.training.set_to_none)  # those too that the optimizer has no group of

    def _gradients(self) -> dict[str, Tensor]:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._scale
        return {n: p.grad.cpu().clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def _clip_by_norm(self, max_norm: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def _clip_by_value(self, clip_value: float) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), clip_value)

    def _parameters(self) -> dict[str, Tensor]:
        return tensors_of(self.model.state_dict())

    def _state(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in tensors_of(self.optimizer.state.get(parameter, {})).items()
        }


class BoostedRun(PlainRun):
    """A training under the plugin on this rank's part of each micro-batch.

    Collective: every rank of the world, in step.
    """

    is_boosted = True

    def __init__(self, training: Training) -> None:
        coordinator = DistCoordinator()
        self.rank = coordinator.rank
        super().__init__(training, coordinator.world_size)
        self._samples //= self._parts

    def _start(self) -> None:
        self.booster = self.training.make_booster()
        self.device = self.booster.device
        original = self.training.make_model(lazy=self.training.lazy)
        self.model, self.optimizer, *_ = self.booster.boost(original, self.training.make_optimizer(original))
        self._names = [name for name, parameter in original.named_parameters() if parameter.requires_grad]

    def tokens(self, step: int, micro: int = 0) -> Tensor:
        """Return this rank's tokens of a micro-batch."""
        whole = super().tokens(step, micro)
        return whole if self.training.same_batches else whole[self.rank :: self.world_size]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the boosted model's logits."""
        return logits_of(self.model(tokens))

    def backward(self, loss: Tensor, *, retain_graph: bool = False, directly: bool = False) -> None:
        """Run backward from a loss; ``directly`` by the loss's own method, in place of the optimizer's."""
        self._total += float(loss.detach())
        if directly:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            self.optimizer.backward(loss, retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the Booster's context for all but the last micro-batch."""
        return self.booster.no_sync(self.model, self.optimizer)

    def measure_norm(self) -> None:
        """Clip the gradients that are there by a norm that they do not have."""
        self.optimizer.clip_grad_by_norm(1e9)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.training.set_to_none)

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: full_gradient(self.booster, self.model, name) for name in self._names}
        return {name: gradient.cpu() for name, gradient in found.items() if gradient is not None}

    def _clip_by_norm(self, max_norm: float, norm_type: float) -> Tensor:
        norm: Tensor = self.optimizer.clip_grad_by_norm(max_norm, norm_type)
        return norm

    def _clip_by_value(self, clip_value: float) -> None:
        self.optimizer.clip_grad_by_value(clip_value)

    def _parameters(self) -> dict[str, Tensor]:
        return whole_model(self.booster, self.model)

    def _state(self) -> dict[str, Tensor]:
        return assembled(self.booster.state_adapter(self.model, self.optimizer).optimizer_shards())


def train_plainly(training: Training, world_size: int) -> Trained:
    """Train in this process on whole batches, with plain torch and on the CPU, whatever the device of the training."""
    return train(PlainRun(replace(training, device="cpu"), world_size))


def train_boosted(training: Training) -> Trained:
    """Train under the plugin on this rank's part of each micro-batch.

    Collective: every rank of the world.
    """
    return train(BoostedRun(training))


def train(run: PlainRun) -> Trained:
    """Run all steps of a training and return its results.

    Collective: as the run.
    """
    for step in range(run.training.steps):
        LOOPS[run.training.loop](run, step)
        run.step(is_last=step + 1 == run.training.steps)
    return run.trained


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the tensors of a ``state_dict`` on the CPU; extra state that is no tensor is left out."""
    return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


def whole_model(booster: Booster, model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers, whole and by name, on every rank.

    Collective: every rank of the world.
    """
    adapter = booster.state_adapter(model)
    whole = assembled(adapter.model_shards())
    whole.update({name: whole[first] for name, first in adapter.tied_names().items()})
    return whole


def assembled(shards: Iterable[TensorShard]) -> dict[str, Tensor]:
    """Return whole tensors by their key in a file, from the shards that all ranks own, on every rank.

    Collective: every rank of the world.
    """
    own = [
        (shard.key, shard.global_shape, shard.box, shard.flat_range, shard.data.detach().cpu().clone())
        for shard in shards
        if shard.is_owner
    ]
    pieces: dict[str, list[Any]] = defaultdict(list)
    for of_rank in DistCoordinator().all_gather_object(own):
        for piece in of_rank:
            pieces[piece[0]].append(piece)
    return {name: _assemble(held) for name, held in pieces.items()}


def _assemble(pieces: Sequence[Any]) -> Tensor:
    """Assemble a tensor from the parts that ranks own, and check that they cover it exactly once."""
    _, shape, _, _, first = pieces[0]
    whole = torch.zeros(shape, dtype=first.dtype)
    covered = torch.zeros(shape, dtype=torch.int32)
    for _, _, box, (start, stop), data in pieces:
        window = tuple(slice(low, high) for low, high in box)
        for target, values in ((whole, data.flatten()), (covered, torch.ones(data.numel(), dtype=torch.int32))):
            part = target[window].flatten().clone()  # of a single row it would be a view, with other strides
            part[start:stop] += values
            target[window] = part.view(target[window].shape)
    assert bool((covered == 1).all()), f"owned shards do not cover {pieces[0][0]} exactly once"
    return whole
