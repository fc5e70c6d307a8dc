"""Gemini's step with a budget of a third of its state, and the rest of the state on disk.

One process, AdamW. Each round measures three things one after the other, so that other load on the machine
affects all of them: a step with everything in RAM, the raw speed of the disk in both directions, and a
step with a budget of a third of parameters, gradients and optimizer state. Bars: the median step takes at most 1.3
times the maximum of computation alone and of moving its bytes at the disk's raw speed; the peak of RSS from the first
step on, relative to that after importing torch, is at most 1.1 times the budget plus activations (measured as the
memory of the run in RAM above its state, after the C library has returned the memory of the first steps); and RSS
is reduced by at least 0.8 of the bytes that are on disk between steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from _results import compare

_BAR_SECONDS, _BAR_MEMORY, _BAR_RESIDENT = 1.3, 1.1, 0.8
_BYTES_PER_PARAMETER = {"fp32": 16, "bf16": 18}
_WARM = 2
"""Warmup rounds: the first records, the second follows the first plan."""


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _model(layers: int, hidden: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8000,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            use_cache=False,
        )
    )


def _train(options: argparse.Namespace) -> None:
    """Train a step for every line of standard input, and print its measurements as a line of JSON."""
    import transformers.models.llama  # noqa: F401 - imported before memory is looked at

    from booster_core import Booster, launch_from_torch
    from booster_gemini import GeminiPlugin
    from booster_gemini.memory.ring import give_back_freed

    launch_from_torch(verbose=False)
    before = _status("VmRSS")
    model = _model(options.layers, options.hidden)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    budget = _BYTES_PER_PARAMETER[options.precision] * num_parameters // 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    where: dict[str, Any] = {}
    if options.folder:
        where = {"placement_policy": "auto", "memory_budget_bytes": budget, "offload_dir": options.folder}
    booster = Booster(mixed_precision=options.precision, plugin=GeminiPlugin(**where))
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    tokens = torch.randint(8000, (options.batch, 128), generator=torch.Generator().manual_seed(0))
    memory = boosted.gatherer.memory  # type: ignore[attr-defined]
    store = getattr(memory, "store", None)
    for number, _ in enumerate(sys.stdin):
        if number == _WARM and not options.folder:
            give_back_freed()
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        start, bytes_before = time.perf_counter(), (sum(store.moved_bytes.values()) if store else 0)
        loss = boosted(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, wrapped)
        wrapped.step()
        wrapped.zero_grad()
        result = {
            "seconds": time.perf_counter() - start,
            "moved": (sum(store.moved_bytes.values()) if store else 0) - bytes_before,
            "loss": loss.item(),
            "parameters": num_parameters,
            "budget": budget,
            "resident": _status("VmRSS") - before,
            "on_disk": memory.bytes_by_place()["disk"] if store else 0,
            "peak": _status("VmHWM") - before,
        }
        print(json.dumps(result), flush=True)


class _Disk:
    """Measures the raw speed of the disk, with one gigabyte in each direction."""

    def __init__(self, folder: str) -> None:
        from booster_gemini.memory.disk import DiskStore
        from booster_runtime.memory import aligned_buffer

        self._store = DiskStore(folder)
        self._buffers = [aligned_buffer(64 << 20) for _ in range(8)]
        for buffer in self._buffers:
            buffer.fill_(1)
        self._offsets = [self._store.allocate(64 << 20) for _ in range(16)]

    def speeds(self) -> tuple[float, float]:
        """Return bytes per second of writing and of reading."""
        found = []
        for move in (self._store.write, self._store.read):
            start = time.perf_counter()
            for first in (0, 8):
                for parts in [move(self._offsets[first + i], buffer) for i, buffer in enumerate(self._buffers)]:
                    wait(parts)
            found.append((1 << 30) / (time.perf_counter() - start))
        return found[0], found[1]


class _Trainer:
    """A process that trains one step per request."""

    def __init__(self, options: argparse.Namespace, *more: str) -> None:
        command = [sys.executable, __file__, "--train"]
        for name in ("batch", "layers", "hidden", "precision"):
            command += [f"--{name}", str(getattr(options, name))]
        self._process = subprocess.Popen([*command, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - this very file

    def step(self) -> dict[str, Any]:
        """Train a step and return its measurements."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._process.stdout.readline())
        return result

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Run the rounds and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--folder", default="")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    if options.train:
        _train(options)
        return
    rounds = []
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        disk = _Disk(folder)
        alone = _Trainer(options)
        ours = _Trainer(options, "--folder", folder)
        for _ in range(options.steps):
            still, (write, read), moved = alone.step(), disk.speeds(), ours.step()
            moving = moved["moved"] / (2 / (1 / write + 1 / read))
            ratio = moved["seconds"] / max(still["seconds"], moving)
            rounds.append((still, moved, ratio))
            print(f"step {moved['seconds']:.2f} s; alone {still['seconds']:.2f}; moving {moved['moved'] / 1e9:.2f} GB "
                  f"{moving:.2f} s (writes {write / 1e9:.2f} GB/s, reads {read / 1e9:.2f}); step / longer {ratio:.3f}",
                  flush=True)  # fmt: skip
        alone.end()
        ours.end()
    still, moved, _ = rounds[-1]
    activations = max(still["peak"] - _BYTES_PER_PARAMETER[options.precision] * still["parameters"], 0)
    print(f"{moved['parameters'] / 1e6:.0f} M parameters, {options.precision}, budget {moved['budget'] / 1e9:.2f} GB")
    what = f"step of Gemini with a third in memory, {options.precision}"
    theirs = [moved["seconds"] / ratio for _, moved, ratio in rounds[_WARM:]]
    ours = [moved["seconds"] for _, moved, _ in rounds[_WARM:]]
    compare(what, ours, theirs, yardstick="the longer of compute alone and of moving its bytes", bar=_BAR_SECONDS)
    what = f"peak memory of it without activations, {options.precision}"
    own = [moved["peak"] - activations]
    compare(what, own, [moved["budget"]], yardstick="the budget", bar=_BAR_MEMORY, unit="B")
    what, fallen = f"resident memory saved, {options.precision}", [still["resident"] - moved["resident"]]
    compare(what, fallen, [moved["on_disk"]], yardstick="bytes on disk", bar=_BAR_RESIDENT, at_least=True, unit="B")
    print(f"same losses: {all(one['loss'] == other['loss'] for one, other, _ in rounds)}")


if __name__ == "__main__":
    main()
