"""Gemini's step without offload, compared with FSDP2 with reshard and with one process without communication.

All runs share the same gloo ranks of one thread each and alternate (A B C A B C ...), so that other load on the machine
affects all of them equally; the result is the ratio of the slower rank's times within a turn. FSDP2 is wrapped
layer by layer, and Gemini's chunks are about as large as a layer.

    python benchmarks/gemini.py --size 25M --dtype bf16
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _results import compare
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_testing import close_ranks, peak_memory, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {
    "25M": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024, "vocab_size": 18000},
    "110M": {"hidden_size": 768, "num_hidden_layers": 8, "intermediate_size": 2048, "vocab_size": 32000},
}
LAYER_BYTES = {"25M": 7 * 2**20, "110M": 28 * 2**20}
"""Bytes of a layer's parameters in fp32: chunks have this size, so that both gather as much at a time."""
TIME_BARS = {"fsdp2": 0.75, "alone": None}
MEMORY_BAR = 0.85
YARDSTICKS = {"fsdp2": "fully_shard with reshard", "alone": "one process without communication"}
SAMPLES, LENGTH = 2, 128


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


def make_step(kind: str, size: str, dtype: torch.dtype, options: dict[str, Any]) -> Callable[[], None]:
    """Return one training step of a kind of run."""
    model = make_model(size, dtype)
    trained: Any = model
    optimizer: Any
    if kind == "gemini":
        layer = LAYER_BYTES[size] * dtype.itemsize // 4
        plugin = GeminiPlugin(**{"master_weights": False, "min_chunk_bytes": layer, **options})
        booster = Booster("cpu", "bf16" if dtype == torch.bfloat16 else "fp32", plugin)
        trained, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    else:
        if kind == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in trained.model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh, reshard_after_forward=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(
        SIZES[size]["vocab_size"], (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank())
    )

    def step() -> None:
        loss = trained(input_ids=tokens, labels=tokens).loss
        if kind == "gemini":
            booster.backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(kinds: list[str], size: str, dtype: torch.dtype, options: dict[str, Any], turns: int) -> dict[str, Any]:
    """Return the times of each kind's steps by turn.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    runs = {kind: make_step(kind, size, dtype, options) for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns + 2):
        for kind, step in runs.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            if turn >= 2:  # the first two steps create state, chunks and caches
                times[kind].append(time.perf_counter() - started)
    return times


def peak_bytes(kind: str, size: str, dtype: torch.dtype, options: dict[str, Any]) -> int:
    """Return the peak of resident memory, relative to that before the model was built.

    Collective: every rank of the world.
    """
    warnings.filterwarnings("ignore")
    with peak_memory() as used:
        step = make_step(kind, size, dtype, options)
        for _ in range(4):
            step()
    return used.peak_bytes


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--no-memory", action="store_true", help="measure times only")
    parser.add_argument("--no-time", action="store_true", help="measure memory only")
    asked = parser.parse_args()
    dtype = torch.float32 if asked.dtype == "fp32" else torch.bfloat16
    kinds = ["gemini", *TIME_BARS]
    case = (asked.size, dtype, {"max_prefetch": asked.prefetch})
    print(f"Llama {asked.size} {asked.dtype}, {asked.ranks} ranks, {asked.turns} turns")
    if not asked.no_time:
        results = run_on_ranks(timed, asked.ranks, kinds, *case, asked.turns, timeout_seconds=3600)
        slowest = {
            kind: [max(times) for times in zip(*(result[kind] for result in results), strict=True)] for kind in kinds
        }
        for kind in kinds:
            print(f"  {kind:7} median {1e3 * statistics.median(slowest[kind]):8.1f} ms")
        what = f"step of the Gemini plugin, Llama {asked.size}, {asked.dtype}"
        for kind, bar in TIME_BARS.items():
            compare(what, slowest["gemini"], slowest[kind], yardstick=YARDSTICKS[kind], bar=bar)
    if not asked.no_memory:
        peaks = {}
        for kind in ("gemini", *TIME_BARS):
            close_ranks()  # a new process each: freed memory may stay in the old process
            peaks[kind] = max(run_on_ranks(peak_bytes, asked.ranks, kind, *case, timeout_seconds=3600))
            print(f"  {kind:7} peak {peaks[kind] / 2**20:8.1f} MiB")
        what, theirs = f"peak memory of the Gemini plugin, Llama {asked.size}, {asked.dtype}", peaks["fsdp2"]
        compare(what, [peaks["gemini"]], [theirs], yardstick=YARDSTICKS["fsdp2"], bar=MEMORY_BAR, unit="B")
    close_ranks()


if __name__ == "__main__":
    main()
