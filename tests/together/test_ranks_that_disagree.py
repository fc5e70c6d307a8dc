"""A call that some ranks only make ends the run soon, and the error names the call and the ranks.

Under every strategy: each waits for other ranks in another way.
"""

from __future__ import annotations

import textwrap

import pytest
from forked_scripts import torchrun_variables
from matrix import matrix

LIMIT_SECONDS = 30.0
"""From the last rank's disagreement to the end of all; what else the machine does is not promised."""

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


@pytest.fixture
def run_script(scripts, tmp_path):
    """Return a function that runs the script on each rank."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def run(plugin, case, num_ranks):
        return scripts.run(script, [[plugin, case, tmp_path]] * num_ranks, torchrun_variables(num_ranks))

    return run


@matrix(
    ["fsdp-a step more while others wait-2"],
    **{
        "plugin, case, num_ranks": [
            ("ddp", "save", 2),
            ("ddp", "a step more", 3),
            ("zero", "save while others train", 3),
            ("fsdp", "a step more while others wait", 2),
            *[
                pytest.param(plugin, case, num_ranks, marks=_slow)
                for plugin, num_ranks in (
                    ("ddp", 3),
                    ("zero", 2),
                    ("zero", 3),
                    ("gemini", 2),
                    ("fsdp", 3),
                    ("hybrid", 2),
                )
                for case in NAMED
            ],
        ]
    },
)
def test_the_call_and_the_ranks_are_named_soon(run_script, plugin, case, num_ranks):
    done = run_script(plugin, case, num_ranks)
    output = done.output
    starts = [float(line.split()[1]) for line in output.splitlines() if line.startswith("AT ")]
    assert len(starts) == num_ranks, output
    assert done.end - max(starts) - done.queued_seconds < LIMIT_SECONDS, output
    alone, call = NAMED[case]
    assert done.codes[alone] == 1, output
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
def test_replicas_that_evaluate_unevenly_are_let_be(run_script):
    done = run_script("hybrid", "replicas evaluate unevenly", 4)
    assert done.codes == [0] * 4, done.output
    assert done.output.count("END") == 4, done.output
