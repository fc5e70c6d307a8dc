"""A call that some ranks only make ends the run soon, and the error names the call and the ranks.

Under every strategy: each waits for other ranks in another way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

LIMIT_SECONDS = 30.0
"""From the last rank's disagreement to its end; what the launcher needs to notice that comes on top."""
LAUNCHER_SECONDS = 15.0

SCRIPT = """
import os, sys, time
import torch
from torch import nn
from booster_core import Booster, launch_from_torch

name, case, folder = sys.argv[1:]
c = launch_from_torch(verbose=False)

def plugin():
    if name == "ddp":
        from booster_ddp import TorchDDPPlugin
        return TorchDDPPlugin()
    if name == "zero":
        from booster_zero import LowLevelZeroPlugin
        return LowLevelZeroPlugin(stage=1, precision="fp32")
    if name == "gemini":
        from booster_gemini import GeminiPlugin
        return GeminiPlugin(precision="fp32")
    if name == "fsdp":
        from booster_fsdp import TorchFSDPPlugin
        return TorchFSDPPlugin()
    from booster_hybrid import HybridParallelPlugin
    return HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")

torch.manual_seed(0)
if name == "hybrid":
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    ))
    def loss_of(model):
        ids = torch.randint(0, 64, (2, 8))
        return model(input_ids=ids, labels=ids).loss
else:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    def loss_of(model):
        return model(torch.randn(4, 8)).square().mean()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
booster = Booster(plugin=plugin())
model, optimizer, *_ = booster.boost(model, optimizer)

def step():
    booster.backward(loss_of(model), optimizer)
    optimizer.step()
    optimizer.zero_grad()

for _ in range(2):
    step()
os.write(1, f"AT {time.time()}\\n".encode())
if case == "save":
    if c.rank == 0:
        booster.save_model(model, folder + "/model")
elif case == "save the optimizer":
    if c.rank == 0:
        booster.save_optimizer(optimizer, folder + "/optimizer")
elif case == "save while others train":
    if c.rank == 0:
        booster.save_model(model, folder + "/model")
    else:
        for _ in range(1000):
            step()
elif case == "a step more":
    if c.rank == 1:
        step()
elif case == "a step more while others wait":
    if c.rank == 1:
        step()
    else:
        c.block_all()
elif case == "replicas evaluate unevenly":
    model.eval()
    with torch.no_grad():
        for _ in range(2 if c.rank < 2 else 1):
            if c.rank == 1:
                time.sleep(9)
            torch.manual_seed(1)
            loss_of(model)
    c.block_all()
os.write(1, f"END {c.rank}\\n".encode())
"""

NAMED = {
    "save": (0, r"`save_model` #1, which"),
    "save the optimizer": (0, r"`save_optimizer` #1, which"),
    "save while others train": (0, r"`save_model` #1, and"),
    "a step more": (1, r"#3, which"),
    "a step more while others wait": (1, r"in `block_all` #1, and rank 1 waits in "),
}
_slow = pytest.mark.slow


def run_script(tmp_path, plugin, case, num_ranks):
    """Run the script; return its exit code, its output, and when it ended."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    screen = tmp_path / "screen"
    with screen.open("wb") as out:
        run = subprocess.Popen(
            [*command, script, plugin, case, tmp_path],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            code = run.wait(timeout=240)
        finally:
            run.kill()
            run.wait()
    return code, screen.read_text(errors="replace"), time.time()


@pytest.mark.parametrize(
    ("plugin", "case", "num_ranks"),
    [
        ("ddp", "save", 2),
        ("ddp", "a step more", 3),
        ("zero", "save while others train", 3),
        ("fsdp", "a step more while others wait", 2),
        *[
            pytest.param(plugin, case, num_ranks, marks=_slow)
            for plugin, num_ranks in (("ddp", 3), ("zero", 2), ("zero", 3), ("gemini", 2), ("fsdp", 3), ("hybrid", 2))
            for case in NAMED
        ],
    ],
)
def test_the_call_and_the_ranks_are_named_soon(tmp_path, plugin, case, num_ranks):
    code, output, end = run_script(tmp_path, plugin, case, num_ranks)
    starts = [float(line.split()[1]) for line in output.splitlines() if line.startswith("AT ")]
    assert len(starts) == num_ranks, output
    assert code == 1, output
    assert end - max(starts) < LIMIT_SECONDS + LAUNCHER_SECONDS, output
    alone, call = NAMED[case]
    others = [rank for rank in range(num_ranks) if rank != alone]
    named = f"rank {others[0]}" if len(others) == 1 else f"ranks {' and '.join(map(str, others))}"
    if "others" in case:
        assert "the ranks wait for each other in different calls" in output, output
        assert f"rank {alone} waits in" in output, output
        assert f"{named} wait" in output, output
    else:
        assert f"{named} ended normally while rank {alone} waits in" in output, output
        assert f"END {alone}" not in output
    assert call in output, output


@pytest.mark.slow
def test_replicas_that_evaluate_unevenly_are_let_be(tmp_path):
    code, output, _ = run_script(tmp_path, "hybrid", "replicas evaluate unevenly", 4)
    assert code == 0, output
    assert output.count("END") == 4, output
