"""`predict` and `measure`: one training under a plugin, planned for ranks that are not there, or run by those that are.

Both boost the user's model, take the same steps by `train_batch`, and count in the same way. A plan only leaves
out the computation and the other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_core.plugin import OptimizerWrapper, unwrap_model
from booster_runtime import train_batch
from booster_runtime.memory import is_absent
from booster_runtime.sharding import local_of
from booster_tools.planning.candidates import Rehearses, check_plannable, without_probes
from booster_tools.planning.relay import Relay
from booster_tools.planning.world import counted, planned_world, planning, watching
from booster_tools.verification.reference import share_of
from booster_tools.verification.run import random_state_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from booster_core.plugin import Plugin
    from booster_core.precision import PrecisionPolicy
    from booster_tools.planning.ledger import Ledger, Traffic
    from booster_tools.planning.mail import Mailbox
    from booster_tools.planning.timeline import Timeline

STEPS = 3
"""Steps that are taken; the last one is counted. Plugins lay out buckets and build DDP after the first."""


class StoppedError(ConfigError):
    """A plan could not go on, as where a library allocates what this machine does not have.

    Args:
        error: Why.
        held_bytes: The most that the rank had held until then.
    """

    def __init__(self, error: Exception, held_bytes: int) -> None:
        super().__init__(str(error) or type(error).__name__)
        self.held_bytes = held_bytes


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is planned or measured.

    Args:
        build: Returns ``(model, optimizer)`` or ``(model, optimizer, criterion)``.
        share: Returns what a data parallel rank gets of the batch, given its index and the number of these ranks.
        loss: Returns the loss of the boosted model and a share; ``None`` steps by `train_batch`.
        mixed_precision: As for `Booster`.
        steps: Steps to take; the last one is counted.
        on_host: Whether ranks compute on the CPU; on accelerators otherwise.
    """

    build: Callable[[], tuple[Any, ...]]
    share: Callable[[int, int], Any]
    loss: Callable[[torch.nn.Module, Any], Tensor] | None = None
    mixed_precision: PrecisionPolicy | str | None = None
    steps: int = STEPS
    on_host: bool = False


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one rank holds, sends and computes in a training step.

    Args:
        world_size: Number of ranks.
        rank: Which of them this is.
        data_parallel_size: Number of ranks that see different samples.
        parameter_bytes: Parameters, buffers and master copies, after the optimizer's step.
        gradient_bytes: Gradients, before they are dropped.
        optimizer_bytes: State of the optimizer.
        other_bytes: What else stays, such as communication buckets.
        peak_bytes: The largest sum of all that lives during the step.
        flops: Floating point operations of matrix products, convolutions and attention.
        traffic: Collectives by kind.
        timeline: What the rank does in the step, in its order.
        seconds: How long it took to find this out.
    """

    world_size: int
    rank: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    other_bytes: int
    peak_bytes: int
    flops: int
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=list, repr=False, compare=False)
    seconds: float = 0.0
    data_parallel_size: int = 1

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def activation_bytes(self) -> int:
        """What lives at the peak on top of what stays: activations, and temporary buffers."""
        return max(self.peak_bytes - self.state_bytes - self.other_bytes, 0)

    @property
    def sent_bytes(self) -> int:
        """What this rank sends in a step, over all collectives."""
        return sum(each.sent_bytes for each in self.traffic.values())


def predict(
    build: Callable[[], tuple[Any, ...]],
    batch: Callable[[], Any],
    plugin: Plugin,
    world_size: int,
    rank: int = 0,
    *,
    mixed_precision: PrecisionPolicy | str | None = None,
    steps: int = STEPS,
    on_host: bool = False,
) -> Prediction:
    """Plan a training step on one rank of a world whose other ranks are not there.

    The plugin's own code runs: `boost`, forward, backward and step. Large tensors have no values, so that a model of
    any size takes little memory and time. The other ranks are taken to do what this one does; those that send it
    messages, as the other stages of a pipeline, are planned as well.

    Args:
        build: Returns ``(model, optimizer)`` or ``(model, optimizer, criterion)``, as for `verify`.
        batch: Returns the whole batch, which data parallel ranks share evenly.
        plugin: One that has boosted nothing.
        world_size: Number of ranks.
        rank: Which of them to plan.
        mixed_precision: As for `Booster`.
        steps: Steps to take; the last one is counted.
        on_host: Whether the ranks compute on the CPU, where large tensors are worked on in smaller blocks.

    Returns:
        What the rank holds, sends and computes.

    Raises:
        ConfigError: If the plugin refuses the model, the batch can't be shared, or an operation's result has a shape
            that depends on values; `StoppedError`, which tells what the rank held, if anything else fails.

    Collective: none. Process groups of this process are not used.
    """
    options: dict[str, Any] = {"mixed_precision": mixed_precision, "steps": steps, "on_host": on_host}
    return predict_ranks(build, batch, plugin, world_size, rank, **options)[rank]


def predict_ranks(
    build: Callable[[], tuple[Any, ...]],
    batch: Callable[[], Any],
    plugin: Plugin,
    world_size: int,
    rank: int = 0,
    *,
    mixed_precision: PrecisionPolicy | str | None = None,
    steps: int = STEPS,
    on_host: bool = False,
) -> dict[int, Prediction]:
    """Plan a training step on one rank, and on all ranks whose messages it needs: those of its pipeline.

    Args:
        build: As for `predict`, as are the others.
        batch: Returns the whole batch.
        plugin: One that has boosted nothing.
        world_size: Number of ranks.
        rank: Which of them to begin with.
        mixed_precision: As for `Booster`.
        steps: Steps to take; the last one is counted.
        on_host: Whether the ranks compute on the CPU.

    Returns:
        By rank, in ascending order.

    Raises:
        ConfigError: As for `predict`.

    Collective: none. Process groups of this process are not used.
    """
    share = _sharing(batch)
    training = Training(build=build, share=share, mixed_precision=mixed_precision, steps=steps, on_host=on_host)
    return predict_training(training, plugin, world_size, rank)


def predict_training(training: Training, plugin: Plugin, world_size: int, rank: int = 0) -> dict[int, Prediction]:
    """Plan a step of a training; see `predict_ranks`.

    Args:
        training: What to plan.
        plugin: One that has boosted nothing.
        world_size: Number of ranks.
        rank: Which of them to begin with.

    Raises:
        ConfigError: As for `predict`.

    Collective: none. Process groups of this process are not used.
    """
    if not 0 <= rank < world_size:
        msg = f"`rank={rank}` is not one of the {world_size} rank(s)."
        raise ConfigError(msg)
    check_plannable(plugin)

    def predict_one(plugin: Plugin, mailbox: Mailbox) -> Prediction:
        started = time.perf_counter()
        try:
            world = planned_world(world_size, mailbox, on_host=training.on_host)
            with world, without_probes(plugin), watching(mailbox, computes=False) as ledger:
                rehearsing = plugin.rehearsing if isinstance(plugin, Rehearses) else None
                try:
                    return _train(training, plugin, ledger, started, rehearsing)
                except RuntimeError as error:
                    raise StoppedError(error, ledger.most_bytes) from error
        finally:
            mailbox.waiting.clear()
            gc.collect()  # strategies keep their model in cycles of hooks

    with planning():
        return Relay(predict_one, plugin, rank).run()


def _sharing(batch: Callable[[], Any]) -> Callable[[int, int], Any]:
    return lambda index, size: share_of(batch(), index, size)


def measure(
    build: Callable[[], tuple[Any, ...]],
    batch: Callable[[], Any],
    plugin: Plugin,
    *,
    mixed_precision: PrecisionPolicy | str | None = None,
    steps: int = STEPS,
) -> Prediction:
    """Train for some steps on the ranks that are there, and count what `predict` predicts.

    Args:
        build: As for `predict`, as are the others.
        batch: Returns the whole batch.
        plugin: One that has boosted nothing.
        mixed_precision: As for `Booster`.
        steps: Steps to take; the last one is counted.

    Returns:
        What this rank holds, sends and computes.

    Collective: every rank of the world.
    """
    training = Training(build=build, share=_sharing(batch), mixed_precision=mixed_precision, steps=steps, on_host=True)
    started = time.perf_counter()
    with random_state_kept(torch.device("cpu")), counted(), watching(computes=True) as ledger:
        return _train(training, plugin, ledger, started)


def _train(
    training: Training,
    plugin: Plugin,
    ledger: Ledger,
    started: float,
    rehearsing: Callable[[torch.nn.Module], AbstractContextManager[None]] | None = None,
) -> Prediction:
    model, optimizer, criterion = built(training.build)
    if not training.on_host:
        _step_as_on_accelerators(optimizer)
    # Plans are made with the CPU's tensors, whatever accelerator is here.
    booster = Booster(device="cpu", mixed_precision=training.mixed_precision, plugin=plugin)
    coordinator = booster.context.coordinator
    index, size = plugin.data_parallel_coordinates(coordinator)
    share = training.share(index, size)
    for leaf in pytree.tree_leaves(share):
        if isinstance(leaf, Tensor):
            ledger.note(leaf)
    boosted = booster.boost(model, optimizer, criterion)
    assert isinstance(boosted.optimizer, OptimizerWrapper), "checked by `boost`"
    del model, optimizer
    phases = _Phases(boosted.model, boosted.optimizer, ledger)
    for index in range(training.steps):
        ledger.start_step()
        if training.loss is None:
            shortened = rehearsing if index < training.steps - 1 else None
            with contextlib.nullcontext() if shortened is None else shortened(boosted.model):
                train_batch(booster, iter([share]), boosted.model, criterion, boosted.optimizer)
        else:
            booster.backward(training.loss(boosted.model, share), boosted.optimizer)
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
        ledger.end_step()
    parameters, gradients, state, others = phases.found
    return Prediction(
        world_size=coordinator.world_size,
        rank=coordinator.rank,
        data_parallel_size=size,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=state,
        other_bytes=others,
        peak_bytes=ledger.peak_bytes,
        flops=ledger.flops,
        traffic=dict(ledger.traffic),
        timeline=ledger.timeline,
        seconds=time.perf_counter() - started,
    )


def built(build: Callable[[], tuple[Any, ...]]) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Return model, optimizer, and criterion or ``None``.

    Raises:
        ConfigError: If ``build`` returns something else.
    """
    made = build()
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(map(isinstance, made, kinds)):
        got = ", ".join(type(each).__name__ for each in made) if isinstance(made, tuple) else type(made).__name__
        msg = f"`build` returns (model, optimizer) or (model, optimizer, criterion); got `{got}`."
        raise ConfigError(msg)
    return made[0], made[1], made[2] if len(made) == 3 else None


def _step_as_on_accelerators(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch step on all parameters at once, as it does by default on accelerators.

    On the CPU its default is one after the other, with the intermediate results of one parameter at a time.
    """
    for options in (optimizer.defaults, *optimizer.param_groups):
        if options.get("foreach", False) is None and not options.get("fused") and not options.get("differentiable"):
            options["foreach"] = True


class _Phases:
    """Tells the ledger what a step does, and sorts what lives at its end, before gradients are dropped.

    Args:
        model: The boosted model.
        optimizer: The boosted optimizer.
        ledger: What to tell.

    Attributes:
        found: Bytes of parameters, gradients, optimizer state and the rest, at the end of the last step.
    """

    def __init__(self, model: torch.nn.Module, optimizer: OptimizerWrapper, ledger: Ledger) -> None:
        self.found = (0, 0, 0, 0)
        self._model, self._optimizer, self._ledger = model, optimizer, ledger
        drop = optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            self._sort()
            drop(*args, **kwargs)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        for name in ("backward", "step"):
            self._tell(name)
        ledger.phase = "forward"

    def _tell(self, phase: str) -> None:
        inner = getattr(self._optimizer, phase)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._ledger.phase = self._ledger.phase, phase
            try:
                return inner(*args, **kwargs)
            finally:
                self._ledger.phase = before

        setattr(self._optimizer, phase, run)

    def _sort(self) -> None:
        inner = self._optimizer.optim
        held = list(itertools.chain.from_iterable(group["params"] for group in inner.param_groups))
        module = unwrap_model(self._model)
        parameters = [*module.parameters(), *held]
        seen: set[int] = set()
        with torch.no_grad():
            own = self._size([*parameters, *module.buffers()], seen)
            gradients = self._size((each.grad for each in parameters if each.grad is not None), seen)
            state = self._size((leaf for each in inner.state.values() for leaf in pytree.tree_leaves(each)), seen)
        # Sharded gradients may be out of sight: what backward made and is still there is nothing else.
        gradients += self._ledger.live_of("backward", seen)
        self.found = own, gradients, state, self._ledger.live_bytes - own - gradients - state

    def _size(self, values: Iterable[Any], seen: set[int]) -> int:
        """Return the size of storages that are counted and not seen yet."""
        total = 0
        for value in values:
            if not isinstance(value, Tensor) or is_absent(value):
                continue
            try:
                storage = local_of(value).untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue  # a stand-in without memory
            key = storage._cdata  # noqa: SLF001 - what identifies a storage
            if key not in seen and storage.device.type != "meta":
                seen.add(key)
                total += self._ledger.size_of(key)
        return total
