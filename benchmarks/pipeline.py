"""Step time of a pipeline relative to the ideal (m + p - 1) / m of its compute: m microbatches on p stages.

Bar: 1.1. Two stages compute a Llama on one thread each; the compute is the sum of the slower rank's record.
Four stages would share too few cores here, so their layers sleep for a fixed time instead of computing; the other
schedules are compared in the same way with the length of their plans. The zero-bubble V must be below the ideal of
schedules that do not split backward.
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
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.policy.base import ShardingPolicy
from booster_runtime.trace import read_traces
from booster_testing import run_on_ranks

if TYPE_CHECKING:
    from booster_hybrid.pipeline.weight_gradients import SplitBackward

MICROBATCHES = 8
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
        ctx.pending.defer(ctx.layer.weight, of_weight)
        return gradients[0], None, None, None


class _SlowForward:
    """Run forward of a sleeping layer, whose weight gradient can be deferred."""

    weight_gradients: SplitBackward | None = None

    def __init__(self, layer: SleepingLayer) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        split = self.weight_gradients
        pending = None if split is None or not x.requires_grad else split.pending_for(self._layer.weight)
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


def _steps(booster: Booster, objects: Any, batch: dict[str, Tensor], criterion: Any, rounds: int) -> list[float]:
    """Return the seconds of forward and backward of batches; each is the slowest rank's."""
    model, optimizer, *_ = objects
    seconds = []
    for number in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        booster.execute_pipeline(itertools.repeat(batch), model, criterion, optimizer)
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        optimizer.zero_grad()
        if number:
            seconds.append(float(taken))
    return seconds


def sleeping(style: str, num_chunks: int, rounds: int) -> list[float]:
    """Return the seconds of steps of a pipeline whose layers sleep."""
    size = dist.get_world_size()
    model = SleepingModel(8)
    batch = {"x": torch.ones(MICROBATCHES, 256, 256)}  # 256 KiB for each microbatch to be sent
    plugin = HybridParallelPlugin(
        pp_size=size,
        num_microbatches=MICROBATCHES,
        pp_style=style,
        num_model_chunks=num_chunks,
        custom_policy=ShardingPolicy(layers=("layers",)),
        example_batch=batch,
    )
    booster = Booster("cpu", plugin=plugin)
    objects = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return _steps(booster, objects, batch, lambda outputs, _: outputs.mean(), rounds)


def computing(size: str, samples: int, folder: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps of a Llama, and of this rank's computation in them."""
    model = llama(size)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(SIZES[size].vocabulary, (samples * MICROBATCHES, LENGTH), generator=generator)
    batch = {"input_ids": numbers, "labels": numbers}
    plugin = HybridParallelPlugin(
        pp_size=dist.get_world_size(), num_microbatches=MICROBATCHES, example_batch=batch, pipeline_record=folder
    )
    booster = Booster("cpu", plugin=plugin)
    objects = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seconds = _steps(booster, objects, batch, lambda outputs, _: outputs.loss, rounds)
    works: dict[int, float] = {}
    for event in read_traces(Path(folder)):
        if event["pid"] == dist.get_rank() and "stage" in event.get("args", {}):
            batch_number = event["args"]["batch"]
            works[batch_number] = works.get(batch_number, 0.0) + event["dur"] / 1e6
    return seconds, [works[number] for number in sorted(works)[1:]]


def main() -> int:
    """Print the ratios, return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    met = True
    for num_ranks, style, num_chunks in (
        (2, "1f1b", 1),
        (4, "1f1b", 1),
        (4, "gpipe", 1),
        (4, "interleaved", 2),
        (4, "zbv", 2),
    ):
        seconds = run_on_ranks(sleeping, num_ranks, style, num_chunks, min(rounds, 5), timeout_seconds=300)[0]
        layers = 8 / num_ranks / num_chunks  # of each stage
        plan = make_schedule(style, num_ranks, MICROBATCHES, num_chunks).duration
        ideal = plan * layers * FORWARD_SECONDS
        if style == "zbv":
            # The bound for schedules with one stage per rank that compute gradients of inputs and weights together.
            ideal = 3 * (MICROBATCHES + num_ranks - 1) * 8 / num_ranks * FORWARD_SECONDS
        against = "(m + p - 1) / m" if style == "zbv" else "the plan"
        what = f"pipeline step, {num_ranks} ranks that sleep, {style}"
        bar = 1.0 if style == "zbv" else 1.1
        met &= compare(what, seconds, [ideal] * len(seconds), yardstick=against, bar=bar)
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = run_on_ranks(computing, 2, "25M", 2, folder, rounds, timeout_seconds=300)
    compute = [max(of_rank) for of_rank in zip(*(each for _, each in of_ranks), strict=True)]
    ideal_seconds = [(MICROBATCHES + 1) / MICROBATCHES * each for each in compute]
    what = "pipeline step, Llama 25M, 2 stages, 1f1b"
    met &= compare(what, of_ranks[0][0], ideal_seconds, yardstick="(m + p - 1) / m of the compute", bar=1.1)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
