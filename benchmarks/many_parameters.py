"""What a step costs the host where a model has very many parameters: ZeRO's against DDP's, with nothing to compute.

10,000 parameters of 16 elements lie in 1,000 buckets, so that a step's time is that of Python and of messages. The bar
is of the CPU time of the thread that trains on one rank alone, as ranks of one host look for each other's messages in
that thread.

    python benchmarks/many_parameters.py --profile
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from _results import compare
from _side_by_side import take_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_PARAMETERS, NUMEL, NUM_BUCKETS = 10_000, 16, 1_000
BAR_SECONDS = 0.02


class Sums(nn.Module):
    """Many parameters, and a sum of them all in one operation, so that backward does next to nothing for each."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(NUMEL)) for _ in range(NUM_PARAMETERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        return (torch.cat([*self.each]) * x).sum()


def make_step(kind: str, options: dict[str, Any]) -> Callable[[], None]:
    """Return a step under a strategy.

    Collective: every rank of the world.
    """
    torch.manual_seed(0)
    model: nn.Module = Sums()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.ones(NUM_PARAMETERS * NUMEL)
    bucket_bytes = 4 * NUMEL * NUM_PARAMETERS // NUM_BUCKETS
    if kind == "ddp":
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True)

        def plain() -> None:
            ddp(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return plain
    booster = Booster("cpu", plugin=LowLevelZeroPlugin(bucket_bytes=bucket_bytes, **options))
    boosted, optimizer, *_ = booster.boost(model, optimizer)

    def step() -> None:
        booster.backward(boosted(x), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_rank(rounds: int, options: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of both, step by step.

    Collective: every rank of the world.
    """
    return take_turns({kind: make_step(kind, options) for kind in ("zero", "ddp")}, rounds, warmup=3)


def host_seconds(kind: str, options: dict[str, Any], steps: int, *, profiles: bool) -> float:
    """Return the median of a step's CPU time, of the thread that trains.

    Collective: every rank of the world.
    """
    step = make_step(kind, options)
    for _ in range(3):
        step()
    times = []
    for _ in range(steps):
        started = time.thread_time()
        step()
        times.append(time.thread_time() - started)
    if profiles:
        profile = cProfile.Profile(time.thread_time)
        profile.runcall(step)
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    return statistics.median(times)


def main() -> int:
    """Print the results; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print where our step spends its time on one rank")
    asked = parser.parse_args()
    options = {"stage": asked.stage}
    taken = {}
    for kind in ("zero", "ddp"):
        profiles = asked.profile and kind == "zero"
        taken[kind] = run_on_ranks(host_seconds, 1, kind, options, asked.rounds, profiles=profiles)[0]
        print(f"  {kind}: {1e3 * taken[kind]:.1f} ms of CPU time in a step", flush=True)
    what = f"CPU time of a step above DDP's, {NUM_PARAMETERS} parameters in {NUM_BUCKETS} buckets, stage {asked.stage}"
    met = compare(what, [taken["zero"] - taken["ddp"]], [BAR_SECONDS], yardstick="20 ms", bar=1.0)
    results = run_on_ranks(on_rank, asked.ranks, asked.rounds, options, timeout_seconds=600)
    what = f"step of {NUM_PARAMETERS} parameters in {NUM_BUCKETS} buckets, ZeRO stage {asked.stage}"
    compare(what, results[0]["zero"], results[0]["ddp"], yardstick="DistributedDataParallel", bar=None)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
