"""Saving and loading 12 GB, fp32 parameters and AdamW's two moments, against ``torch.save`` and torch's DCP.

And what a save in the background blocks, against one copy of the same bytes to pinned memory.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from device_runs.cases import CannotRun, Case, Figure
from torch import nn

from booster_core import Booster
from device_speed.language_models import make_plugin
from device_speed.measuring import Clock, Results, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_runs.cases import Setting
    from typing_extensions import Self

BLOCKED = 1.2
"""The most that a save in the background may block, of a copy to pinned memory."""
_GB = 1e9
_SLOW = 1.5e9
"""Bytes a second below which a disk is not what is measured: memory holds the files then, if it can."""
_PROBE = 1 << 30
_MATRIX = (4096, 4096)


def save_and_load(setting: Setting, *, gigabytes: float, seconds: float, rounds: int) -> Sequence[Figure]:
    """Measure saving and loading, in turns with ``torch.save`` and DCP.

    Args:
        setting: The device.
        gigabytes: What is saved, at most.
        seconds: Of all of it.
        rounds: At most.
    """
    clock = Clock(setting, seconds)
    results = Results(clock)
    with _Bench(setting, gigabytes * _GB) as bench:
        ways = {"ours": bench.ours, "torch": bench.by_torch, "DCP": bench.by_dcp}
        saved: dict[str, list[float]] = {name: [] for name in ways}
        loaded: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (save, load) in ways.items():
                bench.clean()
                saved[name].append(bench.seconds_of(save))
                loaded[name].append(bench.seconds_of(load))
            if clock.left < seconds / 2:
                break
        bench.clean()
        for other, (their_save, their_load) in {
            "torch": ("torch.save with a sync", "torch.load"),
            "DCP": ("DCP's save", "DCP's load"),
        }.items():
            results.figures += [
                Figure(f"save_checkpoint of {bench.label}", saved["ours"], their_save, saved[other]),
                Figure(f"load_checkpoint of {bench.label}", loaded["ours"], their_load, loaded[other]),
            ]
        speed = [bench.num_bytes / each for each in saved["ours"]]
        results.figures += [
            Figure(f"speed of save_checkpoint, {bench.label}", speed, unit="B/s"),
            Figure(
                f"speed of load_checkpoint, {bench.label}",
                [bench.num_bytes / each for each in loaded["ours"]],
                unit="B/s",
            ),
            Figure(f"a plain write with a sync, {bench.where}", [bench.write_speed], unit="B/s"),
        ]
    return results.end()


def blocked(setting: Setting, *, gigabytes: float, seconds: float, rounds: int) -> Sequence[Figure]:
    """Measure how long a save in the background keeps the caller, after a first one, whose memory later ones use."""
    clock = Clock(setting, seconds)
    with _Bench(setting, gigabytes * _GB) as bench:
        pinned = [torch.empty_like(each, device="cpu", pin_memory=True) for each in bench.tensors()]

        def copy() -> None:
            for target, source in zip(pinned, bench.tensors(), strict=True):
                target.copy_(source, non_blocking=True)
            synchronize(setting)

        first = bench.seconds_until_return(bench.save_in_background)
        bench.booster.wait()
        bench.seconds_of(copy)
        ours, theirs = [], []
        for _ in range(rounds):
            bench.clean()
            ours.append(bench.seconds_until_return(bench.save_in_background))
            bench.booster.wait()
            theirs.append(bench.seconds_of(copy))
            if clock.left < 0:
                break
        what = f"time blocked by a save in the background of {bench.label}"
        return [
            Figure(what, ours, "a copy to pinned memory", theirs, bar=BLOCKED),
            Figure(f"{what}, the first one", [first]),
        ]


class _Bench:
    """A model without a forward, its optimizer with state, and a folder.

    Args:
        setting: The device.
        most: Bytes that are saved, at most.

    Attributes:
        num_bytes: Of what is saved.
        where: The kind of folder.
        label: What is saved, and where.
        write_speed: Bytes a second of a plain write with a sync.
    """

    def __init__(self, setting: Setting, most: float) -> None:
        self._setting = setting
        self.folder, self.where, self.write_speed = _fast_folder(setting, most)
        matrix = _MATRIX if setting.is_real else (8, 8)
        number = _number_of_matrices(setting, self.folder, self.write_speed, most)
        with torch.device(setting.device):
            layers = [nn.Linear(*matrix, bias=False) for _ in range(number)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.num_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
        self.label = f"{self.num_bytes / 1e9:.1f} GB, {self.where}"
        self.booster = Booster(setting.device, "fp32", make_plugin("ddp"))
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self._plain, self._plain_optimizer = model, optimizer
        self.ours = (self._save, self._load)
        self.by_torch = (self._save_by_torch, self._load_by_torch)
        self.by_dcp = (self._save_by_dcp, self._load_by_dcp)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def tensors(self) -> list[torch.Tensor]:
        """Return what is saved."""
        state = self._plain_optimizer.state
        return [each for key, own in state.items() for each in (key.detach(), own["exp_avg"], own["exp_avg_sq"])]

    def seconds_of(self, action: Callable[[], object]) -> float:
        """Return the seconds until an action has returned, and the device is done."""
        return self.seconds_until_return(lambda: (action(), synchronize(self._setting)))

    def seconds_until_return(self, action: Callable[[], object]) -> float:
        """Return the seconds until an action has returned, while the device has nothing else to do."""
        synchronize(self._setting)
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    def clean(self) -> None:
        """Delete all files."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _save(self, *, use_async: bool = False) -> None:
        self.booster.save_checkpoint(
            self.folder / "ours", step=1, model=self.model, optimizer=self.optimizer, use_async=use_async
        )

    def _load(self) -> None:
        self.booster.load_checkpoint(self.folder / "ours", model=self.model, optimizer=self.optimizer)

    def save_in_background(self) -> None:
        """Start a save."""
        self._save(use_async=True)

    def _save_by_torch(self) -> None:
        state = {"model": self._plain.state_dict(), "optimizer": self._plain_optimizer.state_dict()}
        with (self.folder / "torch.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def _load_by_torch(self) -> None:
        state = torch.load(self.folder / "torch.pt", map_location=self._setting.device, weights_only=True)
        with torch.no_grad():  # as `load_state_dict` does where it does not swap parameters
            for name, target in self._plain.state_dict().items():
                target.copy_(state["model"][name])
        self._plain_optimizer.load_state_dict(state["optimizer"])

    def _dcp_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return {
            "model": self._plain.state_dict(),
            "optimizer": get_optimizer_state_dict(self._plain, self._plain_optimizer),
        }

    def _save_by_dcp(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._dcp_state(), checkpoint_id=self.folder / "dcp")

    def _load_by_dcp(self) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self._dcp_state(), checkpoint_id=self.folder / "dcp")


def _fast_folder(setting: Setting, most: float) -> tuple[Path, str, float]:
    """Return an empty folder on the local disk, or in memory where that is slow; what it is on; its speed."""
    disk = setting.folder / "checkpoints"
    disk.mkdir()
    speed = _write_speed(setting, disk)
    memory = Path("/dev/shm")
    if setting.is_real and speed < _SLOW and memory.is_dir() and shutil.disk_usage(memory).free > 2 * most:
        folder = memory / f"device-runs-{os.getpid()}"
        folder.mkdir()
        return folder, f"in /dev/shm, as the disk writes {speed / 1e9:.2f} GB/s", _write_speed(setting, folder)
    return disk, "on the local disk", speed


def _write_speed(setting: Setting, folder: Path) -> float:
    num_bytes = _PROBE if setting.is_real else 1 << 16
    block = torch.ones(num_bytes >> 4, dtype=torch.uint8).numpy()
    path = folder / "probe"
    start = time.perf_counter()
    with path.open("wb") as stream:
        for _ in range(16):
            stream.write(block)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return num_bytes / seconds


def _number_of_matrices(setting: Setting, folder: Path, speed: float, most: float) -> int:
    """Return how many matrices make up so many bytes, or as many as fit twice and can be written in 8 seconds."""
    if not setting.is_real:
        return 4
    most = min(most, shutil.disk_usage(folder).free * 0.45, speed * 8)
    number = int(most) // (3 * 4 * _MATRIX[0] * _MATRIX[1])
    if number < 1:
        msg = f"'{folder}' has no space for a checkpoint"
        raise CannotRun(msg)
    return number


CASES = [
    Case(
        "speed: a save in the background",
        blocked,
        {"gigabytes": 6, "seconds": 15, "rounds": 3},
        seconds=60,
        is_timed=True,
    ),
    Case(
        "speed: saving and loading 12 GB",
        save_and_load,
        {"gigabytes": 12, "seconds": 40, "rounds": 2},
        seconds=110,
        is_timed=True,
    ),
]
