"""Step time of ZeRO relative to DDP, ZeroRedundancyOptimizer and one process without communication, on gloo ranks.

Ranks have one thread. All runs share the same processes and alternate (A B C D A B C D ...), so that other load on the
machine affects all of them equally; the result is the ratio of the slower rank's times within a turn.

    python benchmarks/zero.py --size 25M --dtype bf16
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _results import compare
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from booster_core import Booster
from booster_testing import close_ranks, run_on_ranks
from booster_zero import LowLevelZeroPlugin

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {
    "2M": {"hidden_size": 120, "num_hidden_layers": 4, "intermediate_size": 344, "vocab_size": 4000},
    "25M": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024, "vocab_size": 18000},
    "110M": {"hidden_size": 768, "num_hidden_layers": 8, "intermediate_size": 2048, "vocab_size": 32000},
}
BARS = {"ddp": None, "redundancy": 0.94, "alone": None}
YARDSTICKS = {
    "ddp": "DistributedDataParallel",
    "redundancy": "ZeroRedundancyOptimizer",
    "alone": "one process without communication",
}
SAMPLES, LENGTH = 2, 128
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
STEPS = 4
"""Consecutive steps of a contender, so that work that continues after a step is charged to it."""


def make_model(size: str, dtype: torch.dtype) -> nn.Module:
    """Return a Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SIZES[size])
    config = LlamaConfig(
        **sizes,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype)


def make_step(
    kind: str, size: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Callable[[], None], Callable[[], int], Callable[[], None]]:
    """Return functions for a step, for the bytes of this rank's optimizer state, and to finish the last step."""
    model = make_model(size, dtype)
    trained: Any = model
    optimizer: Any
    if kind == "zero":
        plugin = LowLevelZeroPlugin(master_weights=False, **options)
        booster = Booster("cpu", "bf16" if dtype == torch.bfloat16 else "fp32", plugin)
        trained, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    elif kind == "redundancy":
        trained = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        if kind == "ddp":
            trained = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(
        SIZES[size]["vocab_size"], (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def step() -> None:
        loss = trained(input_ids=tokens, labels=tokens).loss
        if kind == "zero":
            booster.backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def state_bytes() -> int:
        inner = optimizer.optim if kind == "redundancy" else optimizer
        return sum(
            int(value.numel() * value.element_size())
            for state in inner.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def finish() -> None:
        next(trained.parameters())  # waits for pending gathers

    return step, state_bytes, finish


def timed(kinds: list[str], size: str, dtype: torch.dtype, options: dict[str, Any], turns: int) -> dict[str, Any]:
    """Return the times of each kind's steps by turn, and the bytes of its state.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    runs = {kind: make_step(kind, size, dtype, options) for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns + 1):
        for kind, (step, _, finish) in runs.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            if kind == "zero":
                finish()
            if turn:  # the first steps create state, buckets and caches
                times[kind].append((time.perf_counter() - started) / STEPS)
    return {"times": times, "state": {kind: state_bytes() for kind, (_, state_bytes, _) in runs.items()}}


def peak_bytes(kind: str, size: str, dtype: torch.dtype, options: dict[str, Any]) -> int:
    """Return the peak of resident memory, relative to that before the model was built.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    from booster_testing import peak_memory

    # Return freed blocks of a MiB to the kernel: the free memory that malloc would keep varies by more than the
    # strategies differ. glibc reads the environment when a process starts, and ranks are forked from one that runs.
    for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        if not ctypes.CDLL(None).mallopt(setting, 1 << 20):
            msg = f"mallopt({setting}) failed"
            raise OSError(msg)
    with peak_memory() as used:
        step, _, _ = make_step(kind, size, dtype, options)
        for _ in range(4):
            step()
    return used.peak_bytes


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    parser.add_argument("--overlap-allgather", action="store_true", help="gather while the next forward begins")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--bucket-mib", type=float, help="size of a bucket; by default the plugin's choice")
    parser.add_argument("--only", choices=["times", "memory"], help="measure one of the two")
    options = parser.parse_args()
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    kinds = ["zero", *BARS]
    plugin_options = {
        "stage": options.stage,
        "overlap_allgather": options.overlap_allgather,
        "bucket_bytes": None if options.bucket_mib is None else int(options.bucket_mib * 2**20),
    }
    case = (options.size, dtype, plugin_options)
    measured = f"{options.ranks} ranks, {options.turns} turns of {STEPS} steps"
    print(f"Llama {options.size} {options.dtype}, {plugin_options}, {measured}")
    if options.only != "memory":
        report_times(kinds, case, options)
    if options.only != "times":
        report_memory(case, options)
    close_ranks()


def report_times(kinds: list[str], case: tuple[Any, ...], options: argparse.Namespace) -> None:
    """Print times and ratios within turns of the slower rank, and bytes of optimizer state."""
    results = run_on_ranks(timed, options.ranks, kinds, *case, options.turns, timeout_seconds=3600)
    slowest = {
        kind: [max(times) for times in zip(*(result["times"][kind] for result in results), strict=True)]
        for kind in kinds
    }
    for kind in kinds:
        state = max(result["state"][kind] for result in results)
        print(f"  {kind:11} median {1e3 * statistics.median(slowest[kind]):8.1f} ms   state {state / 2**20:8.1f} MiB")
    what = f"step of the ZeRO plugin, stage {options.stage}, Llama {options.size}, {options.dtype}"
    for kind, bar in BARS.items():
        compare(what, slowest["zero"], slowest[kind], yardstick=YARDSTICKS[kind], bar=bar)


def report_memory(case: tuple[Any, ...], options: argparse.Namespace) -> None:
    """Print peaks of resident memory, and the savings relative to DDP as a fraction of the paper's formula.

    For P parameters of w bytes on N ranks, the formula gives (N - 1) / N of the state's 2 P w bytes, and with stage 2
    of the gradients' P w bytes as well.
    """
    peaks = {}
    for kind in ("zero", "ddp", "redundancy"):
        close_ranks()  # a new process each: freed memory may stay in the old process
        peaks[kind] = max(run_on_ranks(peak_bytes, options.ranks, kind, *case, timeout_seconds=3600))
        print(f"  {kind:11} peak {peaks[kind] / 2**20:8.1f} MiB")
    with torch.device("meta"):
        parameter_bytes = sum(p.numel() * p.element_size() for p in make_model(options.size, case[1]).parameters())
    saved = peaks["ddp"] - peaks["zero"]
    theory = (options.ranks - 1) / options.ranks * parameter_bytes * (2 if options.stage == 1 else 3)
    what = f"memory saved by ZeRO stage {options.stage}, Llama {options.size}, {options.dtype}"
    compare(what, [saved], [theory], yardstick="the paper's formula", bar=0.9, at_least=True, unit="B")


if __name__ == "__main__":
    main()
