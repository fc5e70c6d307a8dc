"""What a step of a pipeline takes, to the ideal (m + p - 1) / m of its compute: m microbatches on p stages.

Bar: 1.1. Two stages compute a Llama on one thread each, and their compute is what the slower rank's record sums up.
Four stages would share fewer cores here, so their layers sleep for a fixed time instead of computing; the other
schedules are put to the same test against the length of their plans.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _side_by_side import LENGTH, SIZES, llama
from torch import Tensor, nn

from booster_core import Booster
from booster_core.testing import run_on_ranks
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.pipeline.schedule import make_schedule
from booster_hybrid.policy.base import ShardingPolicy

MICROBATCHES = 8
FORWARD_SECONDS = 0.02
"""Of each layer; backward takes twice as long."""


class _Sleep(torch.autograd.Function):
    """Passes on what it gets, after as long as a layer's input gradients take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _SlowWeight(torch.autograd.Function):
    """A parameter whose gradient takes its time; split backward takes no note of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        return x + weight.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return gradients[0], torch.ones(ctx.shape), None


class SleepingLayer(nn.Module):
    """A layer of fixed duration."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep once in forward, and twice in backward."""
        slept: Tensor = _Sleep.apply(x, FORWARD_SECONDS)  # type: ignore[no-untyped-call]
        weighed: Tensor = _SlowWeight.apply(slept, self.weight, FORWARD_SECONDS)  # type: ignore[no-untyped-call]
        return weighed


class SleepingModel(nn.Module):
    """Layers of fixed duration, one after the other."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SleepingLayer() for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        """Go through all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


def _steps(booster: Booster, objects: Any, batch: dict[str, Tensor], criterion: Any, rounds: int) -> list[float]:
    """Return the seconds of forward and backward of batches, each the slowest rank's."""
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
    """Return the seconds of steps of a Llama, and what of them this rank has computed."""
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
    lines = (Path(folder) / f"pipeline-rank{dist.get_rank()}.jsonl").read_text(encoding="utf-8").splitlines()
    batches = [json.loads(line) for line in lines[2:]]
    return seconds, [sum(stop - start for *_, start, stop in each["actions"]) for each in batches]


def _report(what: str, seconds: list[float], ideal: list[float], bar: float) -> bool:
    ratios = [taken / least for taken, least in zip(seconds, ideal, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    median = statistics.median(ratios)
    print(
        f"{what}: {median:.3f} (quartiles {low:.3f} to {high:.3f}; {statistics.median(seconds) * 1e3:.0f} ms to "
        f"{statistics.median(ideal) * 1e3:.0f} ms over {len(ratios)} steps); bar {bar:g}",
        flush=True,
    )
    return median <= bar


def main() -> int:
    """Print the ratios; return 1 if the bar is missed."""
    met = True
    for num_ranks, style, num_chunks in (
        (2, "1f1b", 1),
        (4, "1f1b", 1),
        (4, "gpipe", 1),
        (4, "interleaved", 2),
    ):
        seconds = run_on_ranks(sleeping, num_ranks, style, num_chunks, 5, timeout_seconds=300)[0]
        layers = 8 / num_ranks / num_chunks
        plan = make_schedule(style, num_ranks, MICROBATCHES, num_chunks).duration
        ideal = plan * layers * FORWARD_SECONDS
        what = f"Pipeline step, {num_ranks} stages that sleep, {style}, to the plan"
        met &= _report(what, seconds, [ideal] * len(seconds), 1.1)
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = run_on_ranks(computing, 2, "25M", 2, folder, 8, timeout_seconds=300)
    compute = [max(of_rank) for of_rank in zip(*(each for _, each in of_ranks), strict=True)]
    ideal_seconds = [(MICROBATCHES + 1) / MICROBATCHES * each for each in compute]
    met &= _report("Pipeline step, Llama 25M, 2 stages, 1f1b, to (m + p - 1) / m", of_ranks[0][0], ideal_seconds, 1.1)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
