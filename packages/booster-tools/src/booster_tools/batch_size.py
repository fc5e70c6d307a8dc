"""`find_batch_size`: the largest batch whose training step fits into the memory of each rank's device.

A try runs the plugin's own code and real kernels on the device, in a world in which the other ranks do what this one
does, as in plans. So a rank that runs out of memory leaves no other one waiting in a collective.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from booster_core.errors import BudgetError, ConfigError
from booster_runtime.data import move_batch
from booster_tools.planning.candidates import check_plannable
from booster_tools.planning.recorder import recorded
from booster_tools.planning.world import planned_world
from booster_tools.rehearsal import built, random_state_kept, without_step_hooks
from booster_tools.verification.losses import Losses, has_stages, loss_of_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from booster_core import Booster
    from booster_core.plugin import OptimizerWrapper, Plugin
    from booster_tools.functions import TrainingFunctions

_STEPS = 2
"""The first makes the optimizer's state and lays out buckets; the second has all that stays."""


_OF_A_LIBRARY = "_STATUS_ALLOC_FAILED"
"""In the errors of cuBLAS and cuDNN, which allocate for themselves, where the device has no memory left."""


class BatchSize(NamedTuple):
    """What `find_batch_size` found; their product is where it started.

    Attributes:
        size: Samples of a micro-batch of one data parallel rank.
        accumulation: Micro-batches of a step.
    """

    size: int
    accumulation: int


def find_batch_size(
    functions: TrainingFunctions,
    start: int,
    *,
    booster: Booster,
    step: Callable[[Booster, nn.Module, OptimizerWrapper, Any], object] | None = None,
) -> BatchSize:
    """Return the largest batch size whose training step fits on every rank, and how many of them make a step.

    Call it after the launch, before the training's own model is built. Beginning with ``start``, it trains a model for
    two steps; where a rank's device runs out of memory, all ranks go on with half the size, or the
    next smaller divisor of ``start``, and then accumulate gradients over two micro-batches in each step. Nothing stays:
    no model, no state of a plugin or random generator.

    Each rank tries alone: collectives are skipped, and the others are taken to send what this one does, so values mean
    nothing and a loss may be NaN. What communication libraries allocate for themselves is not seen.

    Example::

        def build():
            model = make_model()
            return model, torch.optim.AdamW(model.parameters())

        def batch(samples):
            tokens = torch.zeros(samples, 4096, dtype=torch.long)
            return {"input_ids": tokens, "labels": tokens}

        size, accumulation = find_batch_size(TrainingFunctions(build, batch), 64, booster=booster)
        model, optimizer, *_ = booster.boost(*build())

    Args:
        functions: Make model, optimizer and, given their number, samples of the largest kind, and compute the loss.
        start: Samples of a step of one data parallel rank; the size to try first.
        booster: Its plugin, precision and device are those of the tries; it boosts nothing.
        step: Trains a step where the loop is another than forward, backward and step of one batch, with the Booster,
            model, optimizer and batch that it is given.

    Raises:
        TypeError: If ``start`` is no int.
        ConfigError: If ``start`` is less than 1, ranks differ in it, the device is the CPU, whose memory has no limit
            that raises, or the plugin has a pipeline, whose number of micro-batches it sets itself, offloads, waits for
            other launches, or can't be copied.
        BudgetError: If one sample does not fit.
        Exception: What the functions raise except for lack of memory, on every rank.

    Collective: every rank of the world.
    """
    coordinator = booster.context.coordinator
    with coordinator.together("find_batch_size"):
        _check(start, booster)
    coordinator.agree("find_batch_size", {"start": start})
    for size in _halves(start):
        problem: str | None = None
        with coordinator.together("find_batch_size"), random_state_kept(booster.device):
            problem = _try(functions, size, booster, step, accumulates=size < start)
        problems = coordinator.all_gather_object(problem, name="find_batch_size")
        if not any(problems):
            return BatchSize(size, start // size)
    rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem)
    msg = (
        f"A training step of one sample does not fit into the memory of rank {rank}: {problem} Use activation "
        "checkpointing, or a plugin that shards more."
    )
    raise BudgetError(msg)


def _check(start: int, booster: Booster) -> None:
    if isinstance(start, bool) or not isinstance(start, int):
        msg = f"`start` of `find_batch_size` is a number of samples; got `{type(start).__name__}`."
        raise TypeError(msg)
    if start < 1:
        msg = f"`start={start}` of `find_batch_size` is no number of samples; use 1 or more."
        raise ConfigError(msg)
    if booster.device.type == "cpu":
        msg = (
            "`find_batch_size` tries what fits into a device's memory, and this run is on the CPU, where the system "
            "ends a process that takes too much. Choose the size by `booster plan`."
        )
        raise ConfigError(msg)
    check_plannable(booster.plugin)
    if has_stages(booster.plugin):
        msg = (
            f"Plugin '{booster.plugin.name}' has a pipeline: its stages hold micro-batches of each other's. Set "
            "`microbatch_size` by `booster plan`, which knows the schedule."
        )
        raise ConfigError(msg)


def _halves(start: int) -> Iterator[int]:
    """Yield divisors of a number in descending order, each at most half of the one before."""
    size = start
    while size:
        yield size
        size = next((each for each in range(size // 2, 0, -1) if start % each == 0), 0)


def _try(
    functions: TrainingFunctions,
    size: int,
    booster: Booster,
    step: Callable[..., object] | None,
    *,
    accumulates: bool,
) -> str | None:
    """Train for some steps; return why they did not fit, or ``None``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="module forward hook with ``always_call=True`` raised")
            _train(functions, size, booster, step or _step_of(functions), accumulates=accumulates)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _OF_A_LIBRARY not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # which hold what was allocated
        return str(error)
    finally:
        gc.collect()  # strategies keep their model in cycles of hooks
        torch.get_device_module(booster.device).empty_cache()
    return None


def _step_of(functions: TrainingFunctions) -> Callable[..., object]:
    """Return a training step on one batch."""
    losses = Losses.by_criterion(functions.loss or loss_of_outputs)

    def step(booster: Booster, model: nn.Module, optimizer: OptimizerWrapper, batch: Any) -> None:
        loss, _ = losses.forward(model, batch)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _train(
    functions: TrainingFunctions,
    size: int,
    booster: Booster,
    step: Callable[..., object],
    *,
    accumulates: bool,
) -> None:
    coordinator = booster.context.coordinator
    with contextlib.ExitStack() as stack:
        # Backward runs on this thread, which has the groups.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(planned_world(coordinator.world_size, coordinator.rank, on_host=True))
        stack.enter_context(recorded(computes=True, is_alone=True))
        second = without_step_hooks(booster, _copied(booster.plugin))
        model, optimizer, *_ = second.boost(*built(functions.build))
        taken: list[bool] = []
        optimizer.on_step.append(lambda _, metrics: taken.append(not metrics["skipped"]))
        for each in optimizer.scaling.optimizers:
            # What others send has no values, and a step that is skipped for them would make no state.
            each.overflow_anywhere = lambda _: False  # type: ignore[method-assign,assignment]

        def samples() -> Any:
            return move_batch(functions.batch(size), booster.device)

        for _ in range(_STEPS):
            if accumulates:  # a backward onto gradients that are there holds more than the first
                with _without_its_end(second, model, optimizer):
                    step(second, model, optimizer, samples())
            step(second, model, optimizer, samples())
        if not any(taken):
            msg = (
                "`step` of `find_batch_size` took no optimizer step, so that the optimizer's state is not there. It "
                "must call `booster.backward` and `optimizer.step()` of what it is given, and leave no step out."
            )
            raise ConfigError(msg)


@contextlib.contextmanager
def _without_its_end(booster: Booster, model: nn.Module, optimizer: OptimizerWrapper) -> Iterator[None]:
    """Let forward and backward of a step run as those of a micro-batch that no step follows."""
    ends = ("clip_grad_by_norm", "clip_grad_by_value", "step", "zero_grad")
    vars(optimizer).update({name: lambda *_, **__: torch.zeros(()) for name in ends})
    try:
        with booster.no_sync(model, optimizer):
            yield
    finally:
        for name in ends:
            del vars(optimizer)[name]


def _copied(plugin: Plugin) -> Plugin:
    try:
        return copy.deepcopy(plugin)
    except Exception as error:
        msg = (
            f"`find_batch_size` tries with a copy of plugin '{plugin.name}', and `copy.deepcopy` failed with "
            f"{type(error).__name__}: {error}. Pass options that can be copied."
        )
        raise ConfigError(msg) from error
