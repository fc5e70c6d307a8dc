"""Speed of saving and loading a Llama and its AdamW state on several ranks, against the disk and against torch DCP.

Run as ``torchrun --nproc-per-node 2 benchmarks/checkpoint.py [--size 110m] [--rounds 5] [--folder DIR]``. Every
figure is a ratio of two things measured in turns (A B A B ...) in one run: the median over the rounds, and the lowest
and highest round. What is compared:

- save: each rank writes an equal share of the same bytes into one file, with the same sync, from one buffer;
- load: each rank reads the same bytes from the same files into memory that exists;
- DCP: ``torch.distributed.checkpoint`` saving and loading the same model and optimizer state;
- async: a copy of what the rank writes, into memory that exists.

Files are read back from the page cache, on either side.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from booster_core.checkpoint import CheckpointIO
from booster_core.checkpoint.raw import as_bytes, pread_into, pwrite_from
from booster_core.coordinator import DistCoordinator
from booster_core.launch import launch_from_torch
from booster_core.state.replicated import ReplicatedStateAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = {"tiny": (128, 2, 1000), "25m": (384, 8, 8000), "110m": (768, 10, 16000)}
_MIB = 1 << 20


class Model(nn.Module):
    """A stack of the matrices of a Llama; nothing is computed here."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{name: nn.Linear(width, width, bias=False) for name in "qkvo"},
                    "gate": nn.Linear(width, width * 8 // 3, bias=False),
                    "up": nn.Linear(width, width * 8 // 3, bias=False),
                    "down": nn.Linear(width * 8 // 3, width, bias=False),
                    "norm": nn.LayerNorm(width),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)


def build(size: str) -> tuple[Model, torch.optim.Optimizer]:
    """Return a model, the same on every rank, and an optimizer with state."""
    torch.manual_seed(0)
    model = Model(*SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank needs."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def in_turns(
    actions: Sequence[Callable[[], object]], rounds: int, between: Callable[[], object] = lambda: None
) -> list[list[float]]:
    """Time actions in turns, after one round that does not count."""
    times: list[list[float]] = [[] for _ in actions]
    for index in range(rounds + 1):
        for action, record in zip(actions, times, strict=True):
            between()
            seconds = timed(action)
            if index:
                record.append(seconds)
    return times


def report(text: str, numerator: list[float], denominator: list[float], bar: str) -> None:
    """Print a ratio on rank 0."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    if dist.get_rank() == 0:
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{text:52s} {statistics.median(ratios):6.2f}  ({spread}; bar {bar})", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="110m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; a temporary folder by default"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    launch_from_torch()
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    coordinator = DistCoordinator()
    folder = coordinator.broadcast_object(options.folder or Path(tempfile.mkdtemp(prefix="booster-bench-")))
    try:
        measure(options.size, options.rounds, folder, coordinator, rank, world_size)
    finally:
        dist.barrier()
        if rank == 0 and options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()


def measure(size: str, rounds: int, folder: Path, coordinator: DistCoordinator, rank: int, world_size: int) -> None:
    """Run all comparisons."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = build(size)
    adapter = ReplicatedStateAdapter(model, optimizer, coordinator)
    io = CheckpointIO(coordinator)
    shards = [shard for shard in (*adapter.model_shards(), *adapter.optimizer_shards())]
    total = sum(shard.data.numel() * shard.data.element_size() for shard in shards)
    mine = sum(shard.data.numel() * shard.data.element_size() for shard in shards if shard.is_owner)
    if rank == 0:
        print(f"{total / _MIB:.0f} MiB of state on {world_size} ranks, {rounds} rounds", flush=True)
    buffer = torch.zeros(mine, dtype=torch.uint8)
    starts = coordinator.all_gather_object(mine)
    first = sum(starts[:rank])
    raw_file = folder / "raw"

    def clean() -> None:
        dist.barrier()
        if rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    def write_raw() -> None:
        descriptor = os.open(raw_file, os.O_CREAT | os.O_WRONLY)
        pwrite_from(descriptor, as_bytes(buffer), first)
        os.fsync(descriptor)
        os.close(descriptor)

    def save() -> None:
        io.save_model(adapter, folder / "model.safetensors")
        io.save_optimizer(adapter, folder / "optimizer.safetensors")

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}

    def save_dcp() -> None:
        dcp.save(state(), checkpoint_id=folder / "dcp")

    ours, raw, theirs = in_turns([save, write_raw, save_dcp], rounds, clean)
    report("speed of saving / of a raw write with the same sync", raw, ours, ">= 0.8")
    report("time of saving / of DCP", ours, theirs, "<= 0.9")

    save(), write_raw(), save_dcp()
    whole = torch.empty(total, dtype=torch.uint8)

    def read_raw() -> None:
        position = 0
        for name in ("model.safetensors", "optimizer.safetensors"):
            path = folder / name
            length = min(path.stat().st_size, total - position)
            descriptor = os.open(path, os.O_RDONLY)
            pread_into(descriptor, as_bytes(whole[position : position + length]), 0, path)
            os.close(descriptor)
            position += length

    def load() -> None:
        io.load_model(adapter, folder / "model.safetensors")
        io.load_optimizer(adapter, folder / "optimizer.safetensors")

    def load_dcp() -> None:
        target = state()
        dcp.load(target, checkpoint_id=folder / "dcp")

    ours, raw, theirs = in_turns([load, read_raw, load_dcp], rounds)
    report("speed of loading / of a raw read into memory", raw, ours, ">= 0.8")
    report("time of loading / of DCP", ours, theirs, "<= 0.5")
    del whole

    owned = [shard.data for shard in shards if shard.is_owner]
    copies = [torch.empty_like(data) for data in owned]

    def copy() -> None:
        for target, data in zip(copies, owned, strict=True):
            target.copy_(data)

    def save_in_background() -> None:
        io.write_folder("save", folder / "async", parts(), use_async=True)

    def parts() -> list[object]:
        from booster_core.checkpoint import ModelPart, OptimizerPart
        from booster_core.checkpoint.naming import MODEL, OPTIMIZER, FileNames

        return [ModelPart(adapter, FileNames(base=MODEL)), OptimizerPart(adapter, FileNames(base=OPTIMIZER))]

    blocked, copied = in_turns([save_in_background, copy], rounds, io.wait)
    report("time blocked by a save in the background / of a copy", blocked, copied, "<= 1.2")
    io.close()


if __name__ == "__main__":
    main()
