"""Step time of pipelines relative to their own plan: the schedule's arithmetic with the measured times of its actions.

Bars: 1.05 of the plan for each schedule, and 0.9 of 1F1B's step for the zero-bubble V's on four ranks, in turns in the
same processes. Four stages would share too few cores here, so their layers sleep for a fixed time in forward, for the
gradient of the input and for that of the weight, which leaves the cores to what lies between: messages, waits and
Python. Two stages compute a Llama, on one thread each.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _results import compare
from _side_by_side import LENGTH, SIZES, llama
from torch import Tensor, nn

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.pipeline.schedule import Action, ActionKind, make_schedule
from booster_hybrid.policy.base import ShardingPolicy
from booster_runtime.trace import read_traces
from booster_testing import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_hybrid.pipeline.schedule import Schedule
    from booster_hybrid.pipeline.weight_gradients import SplitBackward

MICROBATCHES = 8
STYLES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zbv": 2}
"""Schedules, and the stages that each rank has in them."""
FORWARD_SECONDS = 0.02
"""Seconds of each layer's forward; backward takes twice as long."""


class _Slow(torch.autograd.Function):
    """Sleep equally long in forward, for the gradient of the input, and for that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, layer: SleepingLayer, pending: Any) -> Tensor:
        del weight  # an argument, so that autograd computes its gradient
        ctx.layer, ctx.pending = layer, pending
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        time.sleep(FORWARD_SECONDS)

        def of_weight() -> Tensor:
            time.sleep(FORWARD_SECONDS)
            return torch.ones(8)

        if ctx.pending is None:
            return gradients[0], of_weight(), None, None
        ctx.pending.defer(0, of_weight)
        return gradients[0], None, None, None


class _SlowForward:
    """Run forward of a sleeping layer, whose weight gradient can be deferred."""

    weight_gradients: SplitBackward | None = None

    def __init__(self, layer: SleepingLayer) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        split = self.weight_gradients
        pending = None if split is None else split.waiting(x, [self._layer.weight])
        weight = self._layer.weight if pending is None else None
        slept: Tensor = _Slow.apply(x, weight, self._layer, pending)  # type: ignore[no-untyped-call]
        return slept


class SleepingLayer(nn.Module):
    """A layer of fixed duration: once in forward, twice in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.forward = _SlowForward(self)


class SleepingModel(nn.Module):
    """A sequence of layers of fixed duration."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SleepingLayer() for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def _step(booster: Booster, objects: Any, batch: dict[str, Tensor], criterion: Any) -> float:
    """Return the seconds of forward and backward of a batch on the slowest rank."""
    model, optimizer, *_ = objects
    dist.barrier()
    start = time.perf_counter()
    booster.execute_pipeline(itertools.repeat(batch), model, criterion, optimizer)
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    optimizer.zero_grad()
    return float(taken)


def steps(size: str | None, samples: int, folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps of each style, which take turns; a first one of each is left out.

    Args:
        size: Of a Llama of `SIZES`; ``None`` for layers that sleep.
        samples: Sequences in each microbatch of a Llama.
        folder: Where each style's actions are recorded.
        rounds: Steps of each style.
    """
    generator = torch.Generator().manual_seed(0)
    # Of layers that sleep, 256 KiB of each microbatch are sent.
    batch, criterion = {"x": torch.ones(MICROBATCHES, 256, 256)}, lambda outputs, _: outputs.mean()
    if size is not None:
        shape = samples * MICROBATCHES, LENGTH
        numbers = torch.randint(SIZES[size].vocabulary, shape, generator=generator)
        batch, criterion = {"input_ids": numbers, "labels": numbers}, lambda outputs, _: outputs.loss
    boosted = {}
    for style, num_chunks in STYLES.items():
        plugin = HybridParallelPlugin(
            pp_size=dist.get_world_size(),
            num_microbatches=MICROBATCHES,
            pp_style=style,
            num_model_chunks=num_chunks,
            custom_policy=ShardingPolicy(layers=("layers",)) if size is None else None,
            example_batch=batch,
            pipeline_record=Path(folder) / style,
        )
        booster, model = Booster("cpu", plugin=plugin), SleepingModel(8) if size is None else llama(size)
        boosted[style] = booster, booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seconds: dict[str, list[float]] = {style: [] for style in STYLES}
    for _, (style, each) in itertools.product(range(rounds + 1), boosted.items()):
        seconds[style].append(_step(*each, batch, criterion))
    return {style: each[1:] for style, each in seconds.items()}


def planned(schedule: Schedule, seconds: Mapping[Action, float]) -> float:
    """Return how long a batch takes if each action starts when its rank is free and what it needs is there.

    Args:
        schedule: Who does what in which order.
        seconds: How long each action takes.
    """
    last = schedule.placement.num_stages - 1
    ends: dict[Action, float] = {}
    ranks = range(schedule.placement.num_ranks)
    left, free = [schedule.actions(rank) for rank in ranks], [0.0 for _ in ranks]

    def needed(action: Action) -> Action | None:
        work, stage, microbatch = action
        if work is ActionKind.FORWARD:
            return Action(work, stage - 1, microbatch) if stage else None
        if work is ActionKind.BACKWARD_WEIGHT:
            return None  # its rank has computed the input's gradient before
        return Action(ActionKind.FORWARD, last, microbatch) if stage == last else Action(work, stage + 1, microbatch)

    while any(left):
        for rank in ranks:
            while left[rank] and ((need := needed(left[rank][0])) is None or need in ends):
                action = left[rank].pop(0)
                free[rank] = max(free[rank], 0.0 if need is None else ends[need]) + seconds[action]
                ends[action] = free[rank]
    return max(free)


def plans(folder: Path, style: str, num_ranks: int) -> list[float]:
    """Return how long each batch after the first one takes by its plan, with the times that were recorded in it."""
    batches: dict[int, dict[Action, float]] = {}
    for event in read_traces(folder / style):
        about = event.get("args", {})
        if "stage" in about:
            work = ActionKind(event["name"].split()[0])
            action = Action(work, about["stage"], about["microbatch"])
            batches.setdefault(about["batch"], {})[action] = event["dur"] / 1e6
    schedule = make_schedule(style, num_ranks, MICROBATCHES, STYLES[style])
    return [planned(schedule, batches[number]) for number in sorted(batches)[1:]]


def measure(num_ranks: int, size: str | None, rounds: int) -> bool:
    """Print the ratios of all styles, and return whether the bars are met."""
    what = f"pipeline step, {num_ranks} ranks that sleep" if size is None else f"pipeline step, Llama {size}, pp=2"
    met = True
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_on_ranks(steps, num_ranks, size, 2, folder, rounds, timeout_seconds=600)[0]
        for style, each in seconds.items():
            plan = plans(Path(folder), style, num_ranks)
            met &= compare(f"{what}, {style}", each, plan, yardstick="its plan, with measured times", bar=1.05)
    for style in ("interleaved", "zbv") if size is None else ():
        bar = 0.9 if style == "zbv" and num_ranks == 4 else None
        met &= compare(f"{what}, {style}", seconds[style], seconds["1f1b"], yardstick="1f1b", bar=bar)
    return met


def main() -> int:
    """Print the ratios, return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    met = measure(2, None, min(rounds, 5))
    met &= measure(4, None, min(rounds, 5))
    met &= measure(2, "25M", rounds)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
