"""`simulate` and `measure`: one training step under a plugin, by ranks that are not there, or by those that are.

Both boost the user's model, take the same steps, and count in the same way. A plan only leaves out the computation and
the other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import train_batch
from booster_tools.planning.candidates import HasPipeline, LooksAtValues, check_plannable
from booster_tools.planning.recorder import Traffic, recorded
from booster_tools.planning.world import planned_world
from booster_tools.rehearsal import built, random_state_kept, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from booster_core.plugin import Plugin
    from booster_core.precision import PrecisionPolicy
    from booster_tools.planning.recorder import StepRecorder

STEPS = 3
"""Steps that are taken; the last one is counted. Plugins lay out buckets and build DDP after the first."""


class PlanStoppedError(ConfigError):
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
        build: Returns ``(model, optimizer)``, as for `TrainingFunctions`.
        share: Returns what a data parallel rank gets of the batch, given its index and the number of these ranks; see
            `shares_of`.
        criterion: What the model is boosted with, for `train_batch`.
        mixed_precision: As for `Booster`.
        steps: Steps to take; the last one is counted.
        on_host: Whether ranks compute on the CPU, where large tensors are worked on in smaller blocks; on accelerators
            otherwise.
    """

    build: Callable[[], tuple[Any, ...]]
    share: Callable[[int, int], Any]
    criterion: Callable[..., Any] | None = None
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
        num_stages: Ranks of a pipeline.
        idle_share: Which part of the step the rank waits for other stages.
        seconds: How long it took to find this out.
        assumed: What the plugin has assumed, as tensors of a plan have no values.
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
    num_stages: int = 1
    idle_share: float = 0.0
    seconds: float = 0.0
    data_parallel_size: int = 1
    assumed: str | None = None

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


def simulate(training: TrainingStep, plugin: Plugin, world_size: int, rank: int = 0) -> StepCost:
    """Plan a step on one rank of a world whose other ranks are not there.

    The plugin's own code runs: `boost`, forward, backward and step. Large tensors have no values, so that a model of
    any size takes little memory and time. The other ranks are taken to do what this one does. The stages of a pipeline
    are taken as equal parts of the model: it is planned without one, on the ranks of a stage, taking the microbatches
    one after the other.

    Args:
        training: What to simulate.
        plugin: One that has boosted nothing.
        world_size: Number of ranks.
        rank: Which of them to plan.

    Returns:
        What the rank holds, sends and computes.

    Raises:
        ConfigError: If the plugin refuses the model or can't be planned, the batch can't be shared, or an operation's
            result has a shape that depends on values; `PlanStoppedError`, which tells what the rank held, if
            anything else fails.

    Collective: none. Process groups of this process are not used.
    """
    if not 0 <= rank < world_size:
        msg = f"`rank={rank}` is not one of the {world_size} rank(s)."
        raise ConfigError(msg)
    check_plannable(plugin)
    pipeline = plugin if isinstance(plugin, HasPipeline) else None
    found = None if pipeline is None else pipeline.without_pipeline(world_size)
    if pipeline is None or found is None:
        return _simulate(training, plugin, world_size, rank)
    whole, num_stages = found
    size = world_size // num_stages
    try:
        stage = _simulate(training, whole, size, rank % size, _Stage(pipeline, num_stages))
    except PlanStoppedError as error:
        error.held_bytes //= num_stages
        raise
    return replace(stage, world_size=world_size, rank=rank)


class _Stage(NamedTuple):
    """A stage of a pipeline, whose costs are derived.

    Args:
        pipeline: The plugin that has it.
        num_stages: How many there are.
    """

    pipeline: HasPipeline
    num_stages: int

    def cost(self, whole: StepCost, recorder: StepRecorder, num_microbatches: int) -> StepCost:
        """Return what one rank of the pipeline holds, sends to those with the same stage, and computes.

        Args:
            whole: The same of the whole model, which takes the microbatches one after the other.
            recorder: Has counted that.
            num_microbatches: Parts of the batch.
        """
        idle_share, in_flight = self.pipeline.pipeline_costs(num_microbatches)
        others = int((in_flight - 1) * (recorder.kept_bytes or 0))
        peak = max(recorder.peak_of_gradients + others, whole.peak_bytes)
        traffic = {
            kind: Traffic(each.calls, each.payload_bytes // self.num_stages, each.sent_bytes // self.num_stages)
            for kind, each in whole.traffic.items()
        }
        return replace(
            whole,
            parameter_bytes=whole.parameter_bytes // self.num_stages,
            gradient_bytes=whole.gradient_bytes // self.num_stages,
            optimizer_bytes=whole.optimizer_bytes // self.num_stages,
            other_bytes=whole.other_bytes // self.num_stages,
            peak_bytes=peak // self.num_stages,
            flops=whole.flops // self.num_stages,
            traffic=traffic,
            num_stages=self.num_stages,
            idle_share=idle_share,
        )


def _simulate(
    training: TrainingStep, plugin: Plugin, world_size: int, rank: int, stage: _Stage | None = None
) -> StepCost:
    try:
        world = planned_world(world_size, rank, on_host=training.on_host)
        looks = plugin.without_values() if isinstance(plugin, LooksAtValues) else contextlib.nullcontext()
        with world, looks as assumed, recorded(computes=False, is_alone=True) as recorder:
            try:
                return replace(_take_steps(training, plugin, recorder, stage), assumed=assumed)
            except RuntimeError as error:
                raise PlanStoppedError(error, recorder.most_bytes) from error
    finally:
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
    with random_state_kept(torch.device("cpu")), recorded(computes=True) as recorder:
        return _take_steps(training, plugin, recorder)


def _take_steps(
    training: TrainingStep, plugin: Plugin, recorder: StepRecorder, stage: _Stage | None = None
) -> StepCost:
    started = time.perf_counter()
    model, optimizer = built(training.build)
    if recorder.is_alone and not training.on_host:
        _step_as_on_accelerators(optimizer)
    # Plans are made with the CPU's tensors, whatever accelerator is here.
    booster = Booster(device="cpu", mixed_precision=training.mixed_precision, plugin=plugin)
    coordinator = booster.context.coordinator
    index, size = plugin.data_parallel_coordinates(coordinator)
    share = training.share(index, size)
    for leaf in pytree.tree_leaves(share):
        if isinstance(leaf, Tensor):
            recorder.note(leaf)
    parts = [share] if stage is None else stage.pipeline.microbatches(share)
    boosted = booster.boost(model, optimizer, training.criterion)
    del model, optimizer
    recorder.watch(boosted)
    for step in range(training.steps):
        recorder.start_step()
        # Those before lay out what stays, for which two parts do as well as all.
        each = parts if step == training.steps - 1 else parts[:2]
        train_batch(booster, iter(each), boosted.model, boosted.criterion, boosted.optimizer, accumulation=len(each))
    state = recorder.state
    cost = StepCost(
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
        seconds=time.perf_counter() - started,
    )
    return cost if stage is None else stage.cost(cost, recorder, len(parts))


def _step_as_on_accelerators(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch step on all parameters at once, as it does by default on accelerators.

    On the CPU its default is one after the other, with the intermediate results of one parameter at a time.
    """
    for options in (optimizer.defaults, *optimizer.param_groups):
        if options.get("foreach", False) is None and not options.get("fused") and not options.get("differentiable"):
            options["foreach"] = True
