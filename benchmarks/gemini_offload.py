"""A model that is three times as large as the memory it may take: Gemini's step with the rest of its state on a disk.

One process, fp32, AdamW. Three numbers are taken in one run, each in a process of its own: a step with everything in
RAM, the raw speed of the disk in both directions, and a step with a budget of a third of parameters, gradients and
optimizer state. Bars: the step takes at most 1.3 times the longer of computing alone and of moving its bytes at the
disk's raw speed; the peak of RSS above an imported torch is at most 1.1 times the budget, plus activations, which are
what the run in RAM takes above its state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

_BAR_SECONDS, _BAR_MEMORY = 1.3, 1.1
_BYTES_PER_PARAMETER = 16


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


def _train(options: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps and return their times, the bytes moved in each, and the peak."""
    import transformers.models.llama  # noqa: F401 - imported before memory is looked at

    from booster_core import Booster, launch_from_torch
    from booster_gemini import GeminiPlugin

    launch_from_torch(verbose=False)
    before = _status("VmRSS")
    model = _model(options.layers, options.hidden)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    budget = _BYTES_PER_PARAMETER * num_parameters // 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    where: dict[str, Any] = {}
    if options.folder:
        where = {"placement_policy": "auto", "memory_budget_bytes": budget, "offload_dir": options.folder}
    if options.record:
        where["memory_record"] = options.record
    booster = Booster(plugin=GeminiPlugin(**where))
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    tokens = torch.randint(8000, (options.batch, 128), generator=torch.Generator().manual_seed(0))
    seconds, moved, losses = [], [], []
    home = boosted.manager.home  # type: ignore[attr-defined]
    store = getattr(home, "store", None)
    for _ in range(options.steps):
        start, bytes_before = time.perf_counter(), (store.bytes_read + store.bytes_written if store else 0)
        loss = boosted(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, wrapped)
        wrapped.step()
        wrapped.zero_grad()
        seconds.append(time.perf_counter() - start)
        moved.append((store.bytes_read + store.bytes_written if store else 0) - bytes_before)
        losses.append(loss.item())
        print(f"  step {seconds[-1]:.2f} s, {moved[-1] / 1e9:.2f} GB moved", file=sys.stderr, flush=True)
    return {
        "parameters": num_parameters,
        "budget": budget,
        "seconds": statistics.median(seconds[2:]),
        "moved": statistics.median(moved[2:]),
        "peak": _status("VmHWM") - before,
        "losses": losses,
    }


def _disk(folder: str) -> dict[str, float]:
    """Return the raw speed of the disk in bytes per second, as the median of a few gigabytes each way."""
    from booster_gemini.memory.disk import DiskStore, aligned_buffer

    store = DiskStore(folder)
    buffers = [aligned_buffer(64 << 20) for _ in range(8)]
    for buffer in buffers:
        buffer.fill_(1)
    offsets = [store.allocate(64 << 20) for _ in range(16)]
    speeds: dict[str, list[float]] = {"write": [], "read": []}
    for _ in range(4):
        for name, move in (("write", store.write), ("read", store.read)):
            start = time.perf_counter()
            for first in (0, 8):
                for transfer in [move(offsets[first + i], buffer) for i, buffer in enumerate(buffers)]:
                    transfer.wait()
            speeds[name].append((1 << 30) / (time.perf_counter() - start))
    store.close()
    return {name: statistics.median(each) for name, each in speeds.items()}


def _child(part: str, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part, "--steps", str(options.steps), "--batch", str(options.batch)]
    command += ["--layers", str(options.layers), "--hidden", str(options.hidden), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - this very file
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Run the parts and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["train", "disk"])
    parser.add_argument("--folder", default="")
    parser.add_argument("--record", default="")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(_train(options) if options.part == "train" else _disk(options.folder)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        alone = _child("train", options)
        disk = _child("disk", options, "--folder", folder)
        record = ["--record", options.record] if options.record else []
        ours = _child("train", options, "--folder", folder, *record)
    activations = max(alone["peak"] - _BYTES_PER_PARAMETER * alone["parameters"], 0)
    moving = ours["moved"] / (2 / (1 / disk["write"] + 1 / disk["read"]))
    limit = max(alone["seconds"], moving)
    print(f"{ours['parameters'] / 1e6:.0f} M parameters, budget {ours['budget'] / 1e9:.2f} GB")
    print(f"disk: writes {disk['write'] / 1e9:.2f} GB/s, reads {disk['read'] / 1e9:.2f} GB/s")
    print(f"step: {ours['seconds']:.2f} s; alone {alone['seconds']:.2f} s; moving {ours['moved'] / 1e9:.2f} GB "
          f"{moving:.2f} s")  # fmt: skip
    print(f"step / longer of the two: {ours['seconds'] / limit:.3f}; bar {_BAR_SECONDS}")
    over = (ours["peak"] - activations) / ours["budget"]
    print(f"peak {ours['peak'] / 1e9:.2f} GB, activations {activations / 1e9:.2f} GB; (peak - activations) / budget: "
          f"{over:.3f}; bar {_BAR_MEMORY}")  # fmt: skip
    print(f"same losses: {ours['losses'] == alone['losses']}")


if __name__ == "__main__":
    main()
