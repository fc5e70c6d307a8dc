"""`simulate` and `measure`: one training step under a plugin, by ranks that are not there, or by those that are.

Both boost the user's model, take the same steps, and count in the same way. A plan only leaves out the computation and
the other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import train_batch
from booster_tools.planning.candidates import Rehearses, check_plannable, without_probes
from booster_tools.planning.recorder import counted, recorded
from booster_tools.planning.stages import StageThreads
from booster_tools.planning.world import planned_world, planning
from booster_tools.verification.reference import share_of
from booster_tools.verification.run import random_state_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from booster_core import Boosted
    from booster_core.plugin import Plugin
    from booster_core.precision import PrecisionPolicy
    from booster_tools.planning.recorder import StepRecorder, Traffic
    from booster_tools.planning.stages import Messages, Timeline

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
class TrainingStep:
    """What is simulated or measured.

    Args:
        build: Returns ``(model, optimizer)`` or ``(model, optimizer, criterion)``, as for `verify`.
        share: Returns what a data parallel rank gets of the batch, given its index and the number of these ranks; see
            `shares_of`.
        loss: Returns the loss of the boosted model and a share; ``None`` steps by `train_batch`.
        mixed_precision: As for `Booster`.
        steps: Steps to take; the last one is counted.
        on_host: Whether ranks compute on the CPU, where large tensors are worked on in smaller blocks; on accelerators
            otherwise.
    """

    build: Callable[[], tuple[Any, ...]]
    share: Callable[[int, int], Any]
    loss: Callable[[torch.nn.Module, Any], Tensor] | None = None
    mixed_precision: PrecisionPolicy | str | None = None
    steps: int = STEPS
    on_host: bool = False


def shares_of(batch: Callable[[], Any]) -> Callable[[int, int], Any]:
    """Return a function for `TrainingStep` that shares a batch evenly.

    Args:
        batch: Returns the whole batch.
    """
    return lambda index, size: share_of(batch(), index, size)


@dataclass(frozen=True, kw_only=True)
class StepCost:
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


def simulate(training: TrainingStep, plugin: Plugin, world_size: int, rank: int = 0) -> dict[int, StepCost]:
    """Plan a step on one rank of a world whose other ranks are not there, and on those whose messages it needs.

    The plugin's own code runs: `boost`, forward, backward and step. Large tensors have no values, so that a model of
    any size takes little memory and time. The other ranks are taken to do what this one does; those that send it
    messages, as the other stages of its pipeline, are simulated as well.

    Args:
        training: What to simulate.
        plugin: One that has boosted nothing.
        world_size: Number of ranks.
        rank: Which of them to begin with.

    Returns:
        What each rank holds, sends and computes, in ascending order of ranks.

    Raises:
        ConfigError: If the plugin refuses the model or can't be planned, the batch can't be shared, or an operation's
            result has a shape that depends on values; `StoppedError`, which tells what the rank held, if anything else
            fails.

    Collective: none. Process groups of this process are not used.
    """
    if not 0 <= rank < world_size:
        msg = f"`rank={rank}` is not one of the {world_size} rank(s)."
        raise ConfigError(msg)
    check_plannable(plugin)
    with planning():
        return StageThreads(partial(_simulate_rank, training, world_size), plugin, rank).run()


def _simulate_rank(training: TrainingStep, world_size: int, plugin: Plugin, messages: Messages) -> StepCost:
    """Plan a step on one rank, in a thread that is this rank."""
    try:
        world = planned_world(world_size, messages, on_host=training.on_host)
        with world, without_probes(plugin), recorded(messages, computes=False) as recorder:
            try:
                return _take_steps(training, plugin, recorder)
            except RuntimeError as error:
                raise StoppedError(error, recorder.most_bytes) from error
    finally:
        messages.waiting.clear()
        gc.collect()  # strategies keep their model in cycles of hooks


def measure(training: TrainingStep, plugin: Plugin) -> StepCost:
    """Train for some steps on the ranks that are there, on their CPUs, and count what `simulate` predicts.

    Args:
        training: What to run.
        plugin: One that has boosted nothing.

    Returns:
        What this rank holds, sends and computes.

    Collective: every rank of the world.
    """
    with random_state_kept(torch.device("cpu")), counted(), recorded(computes=True) as recorder:
        return _take_steps(training, plugin, recorder)


def _take_steps(training: TrainingStep, plugin: Plugin, recorder: StepRecorder) -> StepCost:
    started = time.perf_counter()
    is_planned = recorder.messages is not None
    model, optimizer, criterion = built(training.build)
    if is_planned and not training.on_host:
        _step_as_on_accelerators(optimizer)
    # Plans are made with the CPU's tensors, whatever accelerator is here.
    booster = Booster(device="cpu", mixed_precision=training.mixed_precision, plugin=plugin)
    coordinator = booster.context.coordinator
    index, size = plugin.data_parallel_coordinates(coordinator)
    share = training.share(index, size)
    for leaf in pytree.tree_leaves(share):
        if isinstance(leaf, Tensor):
            recorder.note(leaf)
    boosted = booster.boost(model, optimizer, criterion)
    del model, optimizer
    recorder.watch(boosted)
    for step in range(training.steps):
        recorder.start_step()
        is_rehearsed = is_planned and step < training.steps - 1
        with _rehearsing(plugin, boosted.model) if is_rehearsed else contextlib.nullcontext():
            _advance(training, booster, boosted, share)
        recorder.end_step()
    state = recorder.state
    return StepCost(
        world_size=coordinator.world_size,
        rank=coordinator.rank,
        data_parallel_size=size,
        parameter_bytes=state.parameters,
        gradient_bytes=state.gradients,
        optimizer_bytes=state.optimizer,
        other_bytes=state.others,
        peak_bytes=recorder.peak_bytes,
        flops=recorder.flops,
        traffic=dict(recorder.traffic),
        timeline=recorder.timeline,
        seconds=time.perf_counter() - started,
    )


def _rehearsing(plugin: Plugin, model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context for the steps that are not counted."""
    return plugin.rehearsing(model) if isinstance(plugin, Rehearses) else contextlib.nullcontext()


def _advance(training: TrainingStep, booster: Booster, boosted: Boosted, share: Any) -> None:
    """Take one step."""
    optimizer: Any = boosted.optimizer
    if training.loss is None:
        train_batch(booster, iter([share]), boosted.model, boosted.criterion, optimizer)
    else:
        booster.backward(training.loss(boosted.model, share), optimizer)
        optimizer.step()
        optimizer.zero_grad()


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
