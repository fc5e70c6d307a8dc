"""The direct transport's collectives against the portable one's over gloo, from 8 bytes to 1 MiB.

Both live in the same ranks and take turns (A B A B ...). Printed are medians of the slower rank: wall-clock time, and
CPU time of the process, which counts where ranks compete with compute.

    python benchmarks/collectives.py --ranks 2 4
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from _results import compare
from _side_by_side import TRANSPORTS

from booster_runtime import collectives
from booster_runtime.collectives.transports import override
from booster_testing import close_ranks, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (8, 64, 512, 4096, 32768, 131072, 1 << 20)
CALLS = 16
"""Calls in a row, so that a turn is long enough to be timed."""


def make_calls(numel: int) -> dict[str, Callable[[], None]]:
    """Return each collective on this many fp32 numbers.

    Collective: none until they are called.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = [numel * each // size for each in range(size + 1)]
    tensor, out = torch.ones(numel), torch.empty(bounds[rank + 1] - bounds[rank])
    lengths = [stop - start for start, stop in pairwise(bounds)]
    received = [lengths[rank] * each for each in range(size + 1)]
    swapped = torch.empty(received[-1])
    return {
        "all_reduce": lambda: collectives.all_reduce(tensor, dist.ReduceOp.AVG).wait(),
        "reduce_scatter": lambda: collectives.reduce_scatter(tensor, bounds, out).wait(),
        "all_gather": lambda: collectives.all_gather(tensor, bounds).wait(),
        "all_to_all": lambda: collectives.all_to_all(tensor, bounds, swapped, received).wait(),
        "broadcast": lambda: collectives.broadcast(tensor).wait(),
    }


def timed(nbytes: int, rounds: int) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return the seconds and CPU seconds of each collective on each transport, by round.

    Collective: every rank of the world.
    """
    found: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for name, call in make_calls(nbytes // 4).items():
        seconds: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
        busy: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
        for number in range(rounds + 1):
            for transport in TRANSPORTS:
                with override(transport):
                    dist.barrier()
                    started, busy_before = time.perf_counter(), time.process_time()
                    for _ in range(CALLS):
                        call()
                    if number:  # the first call chooses the transport
                        seconds[transport].append((time.perf_counter() - started) / CALLS)
                        busy[transport].append((time.process_time() - busy_before) / CALLS)
        found[name] = {transport: (seconds[transport], busy[transport]) for transport in TRANSPORTS}
    return found


def main() -> None:
    """Print a line per collective and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=11)
    asked = parser.parse_args()
    # Loaded under its own name: workers would not find functions of `__main__`.
    spec = importlib.util.spec_from_file_location("collectives_benchmark", Path(__file__).resolve())
    assert spec is not None
    assert spec.loader is not None
    here = importlib.util.module_from_spec(spec)
    sys.modules["collectives_benchmark"] = here
    spec.loader.exec_module(here)
    for ranks in asked.ranks:
        print(f"{ranks} ranks, {asked.rounds} rounds of {CALLS} calls, times of the slower rank")
        for nbytes in SIZES:
            of_ranks = run_on_ranks(here.timed, ranks, nbytes, asked.rounds, timeout_seconds=600)
            for name in of_ranks[0]:
                for part, clock in enumerate(("time", "CPU time")):
                    direct, torch_ = (
                        [max(times) for times in zip(*(each[name][transport][part] for each in of_ranks), strict=True)]
                        for transport in TRANSPORTS
                    )
                    what = f"{clock} of {name}, {nbytes} B, {ranks} ranks"
                    compare(what, direct, torch_, yardstick="the portable transport", bar=None, transport="direct")
    close_ranks()


if __name__ == "__main__":
    main()
