"""A call that some ranks only make, or leave by an exception, ends the run soon, and the error names call and ranks.

Under every strategy: each waits for other ranks in another way.
"""

import textwrap
from pathlib import Path

import named_plugins
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
sys.path.append(sys.argv.pop())
from named_plugins import make_model, plugin_named

name, case, folder = sys.argv[1:]
c = launch_from_torch(verbose=False)
torch.manual_seed(0)
booster = Booster(plugin=plugin_named(name))
model = make_model() if name == "hybrid-tp" else nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

def loss_of(model):
    if name != "hybrid-tp":
        return model(torch.randn(4, 8)).square().mean()
    ids = torch.randint(0, 64, (2, 8))
    return model(input_ids=ids, labels=ids).loss

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
elif case.startswith("caught"):
    from booster_runtime.watch import member
    member.GRACE_SECONDS, errors = 0.5, [torch.OutOfMemoryError("no memory")]

    def fail(*_):
        if c.rank == 1 and errors:
            raise errors.pop()

    for layer in model.unwrap().model.layers if name == "hybrid-tp" else model.unwrap():
        register = layer.register_forward_pre_hook if "forward" in case else layer.register_full_backward_pre_hook
        register(fail)
    try:
        step()
    except torch.OutOfMemoryError:
        if "sleep" in case:
            time.sleep(600)
    optimizer.zero_grad()
    for _ in range(2):
        step()
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
        arguments = [plugin, case, tmp_path, Path(named_plugins.__file__).parent]
        return scripts.run(script, [arguments] * num_ranks, torchrun_variables(num_ranks))

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
                for plugin, num_ranks in (("ddp", 3), ("zero", 3), ("gemini", 2), ("fsdp", 3), ("hybrid-tp", 2))
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


@matrix(
    ["hybrid-tp-forward-next", "gemini-backward-sleep"],
    **{
        "plugin, where": [  # in forward of ZeRO's first stages, no rank waits for another
            (plugin, where)
            for plugin in ("hybrid-tp", "fsdp", "gemini", "zero", "ddp")
            for where in ("forward", "backward")
            if (plugin, where) != ("zero", "forward")
        ],
        "then": ["next", "sleep"],
    },
)
def test_all_ranks_end_when_one_catches_its_error(run_script, plugin, where, then):
    done = run_script(plugin, f"caught in {where}, then {then}", 2)
    assert all(done.codes), done.output
    assert "by an exception that its script caught, and rank 0 waits in" in done.output
    assert "OutOfMemoryError: no memory" in done.output
    start = max(float(line.split()[1]) for line in done.output.splitlines() if line.startswith("AT "))
    assert done.end - start - done.queued_seconds < LIMIT_SECONDS, done.output


@pytest.mark.slow
def test_replicas_that_evaluate_unevenly_are_let_be(run_script):
    done = run_script("hybrid-tp", "replicas evaluate unevenly", 4)
    assert done.codes == [0] * 4, done.output
    assert done.output.count("END") == 4, done.output
