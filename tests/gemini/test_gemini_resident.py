"""What is offloaded leaves the memory of the process: one with all of it there, and one with most of it on a disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, WIDTH, STEPS = 16, 1024, 4


def status_bytes(name):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def train(precision, options):
    """Return the resident bytes between steps, their peak during the last step, and how many are on disk."""
    import torch

    from booster_core import Booster
    from booster_gemini import GeminiPlugin

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    booster = Booster("cpu", precision or None, GeminiPlugin(min_chunk_bytes=1 << 22, **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), fused=True))
    for step in range(STEPS):
        if step == STEPS - 1:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak so far
        optimizer.backward(model(torch.ones(4, WIDTH)).mean())
        optimizer.step()
        optimizer.zero_grad()
    memory = model.gatherer.memory
    on_disk = memory.bytes_by_place()["disk"] if memory.moves else 0
    return status_bytes("RssAnon"), status_bytes("VmHWM"), on_disk


def run(precision, options):
    command = [sys.executable, __file__, precision or "", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process' peak since a moment")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_resident_memory_falls_by_what_is_offloaded(precision, tmp_path):
    resident, peak, _ = run(precision, {})
    options = {"offload_dir": str(tmp_path), "offload_param_frac": 1.0, "offload_optim_frac": 1.0}
    moved_resident, moved_peak, on_disk = run(precision, options)
    # The last blocks of a step may still be on their way.
    assert on_disk >= 0.7 * LAYERS * WIDTH**2 * (12 if precision is None else 14)
    assert resident - moved_resident >= 0.8 * on_disk
    assert peak - moved_peak >= 0.8 * on_disk


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], json.loads(sys.argv[2]))))
