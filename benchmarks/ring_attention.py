"""Time and memory of ring attention relative to torch's attention on one process, forward and backward.

Ranks have one thread. One of them runs torch's attention over the whole sequence while the others wait; then all run
ring attention, and the kernels of torch's context parallelism, in turns within the same processes. Reported are the
wall time and the CPU time of the slower rank, divided by those of the whole sequence over the number of ranks: CPU time
does not count what other programs take from a busy machine, nor waiting for messages. Memory is the peak above inputs
and the gradients of outputs, each contender in new processes.

    python benchmarks/ring_attention.py --tokens 8192 --ranks 2
"""
# ruff: noqa: SLF001 - what torch's context parallelism is made of is private

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _results import compare
from torch import nn

from booster_hybrid.mesh import RankGroup
from booster_hybrid.sequence_parallel.exchange import SequenceLayout
from booster_hybrid.sequence_parallel.mask import Visibility
from booster_hybrid.sequence_parallel.ring_attention import AttentionCall, ring_attention
from booster_testing import close_ranks, peak_memory, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TIME_BAR, MEMORY_BAR = 1.15, 1.10
SIZE = 64
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_inputs(heads: int, positions: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values, and the gradient of the outputs."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, positions, SIZE)
    *inputs, weights = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    return [each.requires_grad_() for each in inputs], weights


def whole(inputs: list[Tensor], weights: Tensor, tokens: int) -> None:
    """Attend on one process, by torch's own attention."""
    del tokens
    if dist.get_rank() == 0:
        outputs = nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.autograd.grad(outputs, inputs, weights)


def ours(inputs: list[Tensor], weights: Tensor, tokens: int) -> None:
    """Attend from this rank's positions."""
    group = RankGroup.of(None)
    layout = SequenceLayout(tokens, group.size, zigzag=True)
    outputs = ring_attention(*inputs, AttentionCall(Visibility(None, is_causal=True), layout, group))
    torch.autograd.grad(outputs, inputs, weights)


def by_torch(inputs: list[Tensor], weights: Tensor, tokens: int) -> None:
    """Attend by the functions under torch's ``context_parallel``, which has no entry for the CPU's kernels."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as private

    del tokens
    attend: Any = private._templated_ring_attention
    differentiate: Any = private._templated_ring_attention_backward
    kernels: Any = torch.ops.aten
    plain = [each.detach() for each in inputs]
    group = dist.group.WORLD
    outputs, logarithms, *_ = attend(
        group, 2, kernels._scaled_dot_product_flash_attention_for_cpu, *plain, is_causal=True, dropout_p=0.0
    )
    backward = kernels._scaled_dot_product_flash_attention_for_cpu_backward
    options = {"is_causal": True, "dropout_p": 0.0}
    differentiate(group, 2, backward, weights, "grad_out", *plain, outputs, logarithms, **options)


CONTENDERS: dict[str, Callable[[list[Tensor], Tensor, int], None]] = {"whole": whole, "ours": ours, "torch": by_torch}


def inputs_of(name: str, heads: int, tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return what a contender attends with on this rank."""
    is_whole = name == "whole"
    return make_inputs(heads, tokens if is_whole else tokens // dist.get_world_size(), dtype)


def timed(names: list[str], heads: int, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, list[list[float]]]:
    """Return wall and CPU seconds of each contender by round; the slower rank's.

    Collective: every rank of the world.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    inputs = {name: inputs_of(name, heads, tokens, dtype) for name in names}
    for number in range(rounds + 1):
        for name in names:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            CONTENDERS[name](*inputs[name], tokens)
            taken = torch.tensor([time.perf_counter() - wall, time.process_time() - processor], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number:  # the first round warms up
                seconds[name].append(taken.tolist())
    return seconds


def peak_bytes(name: str, heads: int, tokens: int, dtype: torch.dtype) -> int:
    """Return the peak of memory of a forward and a backward, above inputs.

    Collective: every rank of the world.
    """
    small, small_weights = inputs_of(name, heads, 64, dtype)
    CONTENDERS[name](small, small_weights, 64)  # what is loaded once
    inputs, weights = inputs_of(name, heads, tokens, dtype)
    with peak_memory() as used:
        CONTENDERS[name](inputs, weights, tokens)
    return used.peak_bytes


def main() -> int:
    """Print ratios; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", choices=FORMATS, nargs="+", default=["fp32"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    met = True
    for dtype in asked.dtype:
        case = (asked.heads, asked.tokens, FORMATS[dtype])
        print(f"{asked.tokens} tokens, {asked.heads} heads of {SIZE}, {dtype}, {asked.ranks} ranks", flush=True)
        seconds, *_ = run_on_ranks(timed, asked.ranks, list(CONTENDERS), *case, asked.rounds, timeout_seconds=1800)
        for name in ("ours", "torch"):
            case_name = f"attention of {asked.tokens} tokens, {asked.heads} heads, {dtype}"
            of = "ring attention" if name == "ours" else "torch's context parallelism"
            for place, clock in enumerate(("wall time", "CPU time")):
                own = [pair[place] for pair in seconds[name]]
                whole_on_ranks = [pair[place] / asked.ranks for pair in seconds["whole"]]
                bar = TIME_BAR if (name, place) == ("ours", 0) else None
                what = f"{clock} of {of}, {case_name}"
                met &= compare(what, own, whole_on_ranks, yardstick="one process / ranks", bar=bar)
        peaks = {}
        for name in CONTENDERS:
            close_ranks()  # a new process each: freed memory may stay in the old process
            peaks[name] = max(run_on_ranks(peak_bytes, asked.ranks, name, *case, timeout_seconds=900))
            print(f"  peak of {name:5} {peaks[name] / 2**20:8.1f} MiB", flush=True)
        what = f"peak memory of ring attention, {asked.tokens} tokens, {dtype}"
        met &= compare(what, [peaks["ours"]], [peaks["whole"]], yardstick="one process", bar=MEMORY_BAR, unit="B")
    close_ranks()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
