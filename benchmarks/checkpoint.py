"""Speed of saving and loading a Llama and its AdamW state on several ranks, against the disk and against torch DCP.

Run as ``python benchmarks/checkpoint.py [--size 110m] [--ranks 2] [--rounds 5] [--folder DIR]``. Every figure is a
ratio of two measurements by turns, in a random order, in one run: the median over the rounds, and the quartiles. Only
the two that are compared take turns, and states are loaded in new processes: a load into new memory costs about half
where another library's has just left memory of that size, which nothing has in a job that resumes. The comparisons:

- save: each rank writes an equal part of the same bytes into one file, with the same sync, from one buffer;
- load: each rank reads the same bytes from the same files into allocated memory;
- DCP: ``torch.distributed.checkpoint`` saves and loads the same model and optimizer state;
- async: a copy of the bytes that the rank writes, into allocated memory, and DCP's ``async_save``: the time until the
  call returns, while nothing is written;
- training states: `save_checkpoint` and `load_checkpoint`, with checksums, against DCP, and against ``torch.save`` on
  rank 0, with a sync, and ``torch.load`` on every rank; and against Accelerate's ``save_state`` and ``load_state`` and
  DeepSpeed's ZeRO stage 1, with a sync, where they are installed;
- scale: what very many tensors and ranks take (`_checkpoint_scale`).

Files are read from the page cache on both sides, except where it says "cold": the page cache is emptied of them before
each load, and ``mincore`` confirms it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from _checkpoint_scale import measure as measure_scale
from _results import compare
from other_libraries import load as load_yardstick
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from booster_checkpoint import CheckpointEngine, ModelPart, OptimizerPart
from booster_checkpoint.files.names import MODEL, OPTIMIZER, FileNames
from booster_checkpoint.save.in_place import write_at
from booster_checkpoint.save.save import BUCKET_BYTES, Saver
from booster_checkpoint.save.targets import target_at
from booster_checkpoint.session import Session
from booster_core import Booster
from booster_core.checkpoint_io import LoadRequest, ModelState, SaveRequest
from booster_core.ranks import DistCoordinator
from booster_core.state import ReplicatedStateAdapter, as_bytes
from booster_testing import close_ranks, run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"tiny": (128, 2, 1000), "25m": (384, 8, 8000), "110m": (768, 10, 16000)}
_MIB = 1 << 20


class Model(nn.Module):
    """The matrices of a Llama, without a forward."""

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
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    between: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Time two actions in turns, in an order of each round's own, after one warmup round."""
    times: tuple[list[float], list[float]] = [], []
    order = random.Random(0)  # noqa: S311 - the same on every rank
    for index in range(rounds + 1):
        for action, record in order.sample([(ours, times[0]), (theirs, times[1])], 2):
            between()
            seconds = timed(action)
            if index:
                record.append(seconds)
    return times


def report(text: str, ours: list[float], theirs: list[float], bar: float | None) -> None:
    """Report seconds on rank 0; ``text`` is what is measured and its yardstick, ``A / of B``."""
    if dist.get_rank() == 0:
        what, _, yardstick = text.partition(" / of ")
        compare(what, ours, theirs, yardstick=yardstick, bar=bar)


def report_speed(text: str, ours: list[float], theirs: list[float], nbytes: int, bar: float) -> None:
    """Report the speeds, on rank 0, at which bytes were moved in some seconds; see `report`."""
    if dist.get_rank() == 0:
        what, _, yardstick = text.partition(" / of ")
        speeds = ([nbytes / each for each in seconds] for seconds in (ours, theirs))
        compare(what, *speeds, yardstick=yardstick, bar=bar, at_least=True, unit="B/s")


def drop_from_page_cache(path: Path) -> None:
    """Write a file out and forget its pages.

    Raises:
        RuntimeError: If some stay in memory: a load would not be a cold one.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            return
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(descriptor, size) as mapping:
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            start = ctypes.c_char.from_buffer(mapping)
            try:
                ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
            finally:
                del start
            resident = sum(page & 1 for page in pages)
            if resident * 20 > len(pages):
                msg = f"{resident} of {len(pages)} pages of '{path}' are still in memory."
                raise RuntimeError(msg)
    finally:
        os.close(descriptor)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="110m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to measure; a temporary folder by default"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--only", choices=["parts", "states", "scale"], default=None, help="leave out the other comparisons"
    )
    options = parser.parse_args()
    yardsticks = {"parts": ["parts"], "states": ["DCP", "torch", "accelerate", "deepspeed"], "scale": []}
    for yardstick in yardsticks[options.only] if options.only else [*yardsticks["parts"], *yardsticks["states"]]:
        run_on_ranks(
            on_rank,
            options.ranks,
            options.size,
            options.rounds,
            options.folder,
            yardstick,
            timeout_seconds=3600,
            group_timeout_seconds=600,
        )
        close_ranks()  # the next ones are new processes
    if options.only in (None, "scale"):
        measure_scale(options.rounds)


def on_rank(size: str, rounds: int, folder: Path | None, yardstick: str) -> None:
    """Run the comparisons with one yardstick on this rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    coordinator = DistCoordinator()
    place = coordinator.broadcast_object(folder or Path(tempfile.mkdtemp(prefix="booster-bench-")))
    try:
        bench = Bench(size, rounds, place, coordinator)
        if yardstick == "parts":
            bench.run()
        else:
            bench.run_states(yardstick)
    finally:
        dist.barrier()
        if coordinator.rank == 0 and folder is None:
            shutil.rmtree(place, ignore_errors=True)


class Bench:
    """The measurements on one rank.

    Args:
        size: One of `SIZES`.
        rounds: Number of measurements of each action.
        folder: Folder for the files.
        coordinator: The coordinator of the ranks.
    """

    def __init__(self, size: str, rounds: int, folder: Path, coordinator: DistCoordinator) -> None:
        self.size, self.rounds = size, rounds
        self.folder = folder
        self.rank = coordinator.rank
        self.model, self.optimizer = build(size)
        self.adapter = ReplicatedStateAdapter(self.model, self.optimizer, coordinator)
        booster = Booster("cpu")
        self.io = CheckpointEngine(booster.plugin, booster.context)
        self.saver = Saver(Session(coordinator, timeout_seconds=None), BUCKET_BYTES)
        shards = [*self.adapter.model_shards(), *self.adapter.optimizer_shards()]
        self.total = sum(shard.data.nbytes for shard in shards)
        self.owned = [shard.data for shard in shards if shard.is_owner]
        mine = sum(data.nbytes for data in self.owned)
        self.first = sum(coordinator.all_gather_object(mine)[: self.rank])
        self.buffer = torch.ones(mine, dtype=torch.uint8)  # zeros would be one page of the system, for ever in a cache
        self.files = folder / "model.safetensors", folder / "optimizer.safetensors"
        self.pending: Any = None
        self.group = dist.new_group(backend="gloo")  # DCP communicates in the background
        if self.rank == 0:
            print(
                f"{self.total / _MIB:.0f} MiB of state on {coordinator.world_size} ranks, {rounds} rounds", flush=True
            )

    def clean(self) -> None:
        """Delete all files."""
        dist.barrier()
        if self.rank == 0:
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    def save(self) -> None:
        """Save with Booster."""
        self.io.save_model(ModelState(adapter=self.adapter), SaveRequest(call="save_model", path=self.files[0]))
        self.io.save_optimizer(self.adapter, SaveRequest(call="save_optimizer", path=self.files[1]))

    def load(self) -> None:
        """Load with Booster."""
        self.io.load_model(ModelState(adapter=self.adapter), LoadRequest(call="load_model", path=self.files[0]))
        self.io.load_optimizer(self.adapter, LoadRequest(call="load_optimizer", path=self.files[1]))

    def write_raw(self) -> None:
        """Write the same bytes by plain I/O."""
        descriptor = os.open(self.folder / "raw", os.O_CREAT | os.O_WRONLY)
        write_at(descriptor, as_bytes(self.buffer), self.first)
        os.fsync(descriptor)
        os.close(descriptor)

    def read_raw(self) -> None:
        """Read the same bytes by plain I/O."""
        position = 0
        for path in self.files:
            length = min(path.stat().st_size, self.total - position)
            descriptor = os.open(path, os.O_RDONLY)
            target, offset = as_bytes(self.buffer[position : position + length]), 0
            while target:
                count = os.preadv(descriptor, [target[: 1 << 30]], offset)
                target, offset = target[count:], offset + count
            os.close(descriptor)
            position += length

    def dcp_state(self) -> dict[str, object]:
        """Return the state as torch's state dict."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return {"model": self.model.state_dict(), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def save_dcp(self) -> None:
        """Save with torch."""
        dcp_save(self.dcp_state(), checkpoint_id=self.folder / "dcp")

    def load_dcp(self) -> None:
        """Load with torch."""
        dcp_load(self.dcp_state(), checkpoint_id=self.folder / "dcp")

    def save_torch(self) -> None:
        """Save on rank 0 by ``torch.save``, as scripts do."""
        if self.rank == 0:
            with (self.folder / "torch.pt").open("wb") as stream:
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, stream)
                stream.flush()
                os.fsync(stream.fileno())
        dist.barrier()

    def load_torch(self) -> None:
        """Load on every rank by ``torch.load``."""
        state = torch.load(self.folder / "torch.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save_in_background(self) -> None:
        """Save with Booster in the background."""
        parts = [
            ModelPart(self.adapter, FileNames(base=MODEL)),
            OptimizerPart(self.adapter, FileNames(base=OPTIMIZER)),
        ]
        self.saver.save(parts, target_at(self.folder / "background"), "save", use_async=True)

    def save_dcp_in_background(self) -> None:
        """Save with torch in the background."""
        folder = self.folder / "dcp-background"
        self.pending = dcp_async_save(self.dcp_state(), checkpoint_id=folder, process_group=self.group)

    def wait(self) -> None:
        """Wait until nothing is written any more."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        self.saver.begin(
            "wait", use_async=True
        )  # which keeps the memory of snapshots, as saves that follow each other do
        dist.barrier()

    def run(self) -> None:
        """Run all comparisons."""
        ours, raw = in_turns(self.save, self.write_raw, self.rounds, self.clean)
        report_speed("speed of saving / of a raw write with the same sync", ours, raw, self.total, 0.8)
        ours, theirs = in_turns(self.save, self.save_dcp, self.rounds, self.clean)
        report("time of saving / of DCP", ours, theirs, 0.55)
        self.clean()
        self.save()
        self.save_dcp()
        self.buffer = torch.empty(self.total, dtype=torch.uint8)
        ours, raw = in_turns(self.load, self.read_raw, self.rounds)
        report_speed("speed of loading / of a raw read into memory", ours, raw, self.total, 0.8)
        self.buffer = torch.empty(0, dtype=torch.uint8)
        ours, theirs = in_turns(self.load, self.load_dcp, self.rounds)
        report("time of loading / of DCP", ours, theirs, 0.4)
        copies = [torch.empty_like(data) for data in self.owned]

        def copy() -> None:
            for target, data in zip(copies, self.owned, strict=True):
                target.copy_(data)

        blocked, copied = in_turns(self.save_in_background, copy, self.rounds, self.wait)
        report("time blocked by a save in the background / of a copy", blocked, copied, 1.2)
        blocked, theirs = in_turns(self.save_in_background, self.save_dcp_in_background, self.rounds, self.wait)
        self.wait()
        report("time blocked by a save in the background / of DCP's", blocked, theirs, 0.5)
        self.saver.buffers.release()

    def drop(self) -> None:
        """Empty the page cache of all files."""
        dist.barrier()
        if self.rank == 0:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    drop_from_page_cache(path)
        dist.barrier()

    def run_states(self, name: str) -> None:
        """Compare whole training states with a library's."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
        booster = Booster("cpu", None, "ddp")
        model, optimizer, *_ = booster.boost(self.model, self.optimizer)
        root = self.folder / "states"

        def save() -> None:
            booster.save_checkpoint(root, step=1, model=model, optimizer=optimizer)

        def load() -> None:
            booster.load_checkpoint(root, model=model, optimizer=optimizer)

        bars: dict[str, float] = {}
        names = name, name
        if name == "DCP":
            their_save, their_load = self.save_dcp, self.load_dcp
            bars = {"save": 0.55, "warm": 0.4, "cold": 0.9}
        elif name == "torch":
            their_save, their_load = self.save_torch, self.load_torch
            names = "torch.save", "torch.load"
        else:
            try:
                yardstick = load_yardstick(name)
            except ImportError as error:
                if self.rank == 0:
                    print(f"{name} is left out: {error}.", flush=True)
                return
            names = yardstick.NAME, yardstick.NAME
            their_save, their_load = yardstick.make_checkpoint(build(self.size)[0], self.folder / yardstick.NAME)
        times = in_turns(save, their_save, self.rounds, self.clean)
        report(f"time of save_checkpoint / of {names[0]}", *times, bars.get("save"))
        self.clean()
        save()
        their_save()
        for what, between in (("warm", dist.barrier), ("cold", self.drop)):
            times = in_turns(load, their_load, self.rounds, between)
            report(f"time of load_checkpoint, {what} / of {names[1]}", *times, bars.get(what))
            if what == "cold":  # other guests of a host scatter them; the least has met the fewest
                report(f"least time of load_checkpoint, cold / of {names[1]}", *([min(each)] for each in times), None)


if __name__ == "__main__":
    main()
