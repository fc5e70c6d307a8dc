"""One rank raises where others wait for it, and its script catches that and goes on: all end within seconds, named."""

from __future__ import annotations

import time
from pathlib import Path

import named_plugins
from forked_scripts import torchrun_variables
from matrix import matrix

SCRIPT = """
import pathlib, sys, time
import torch
from torch import nn
from booster_core import Booster, launch_from_torch
from booster_runtime.watch import member
sys.path.append(sys.argv.pop())
from named_plugins import make_model, plugin_named

member.GRACE_SECONDS = 0.5
name, where, then, told = sys.argv[1:]
rank = launch_from_torch(timeout_seconds=1200.0).rank
booster, model = Booster(plugin=plugin_named(name)), make_model()
model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fail(*_):
    if rank == 1 and step == 1:
        pathlib.Path(told).write_text(str(time.time()))
        raise torch.OutOfMemoryError("no memory")


for layer in model.unwrap().model.layers:
    if where == "forward":
        layer.register_forward_pre_hook(fail)
    else:
        layer.register_full_backward_pre_hook(fail)
tokens = torch.arange(12).view(2, 6)
for step in range(4):
    try:
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
    except torch.OutOfMemoryError:
        if then == "sleep":
            time.sleep(600)
    optimizer.zero_grad()
"""


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
def test_all_ranks_end_when_one_catches_its_error(plugin, where, then, scripts, tmp_path):
    (tmp_path / "catches.py").write_text(SCRIPT)
    arguments = [plugin, where, then, tmp_path / "failed", Path(named_plugins.__file__).parent]
    run = scripts.run(tmp_path / "catches.py", [arguments] * 2, torchrun_variables(2))
    assert all(run.codes), run.output
    assert "by an exception that its script caught, and rank 0 waits in" in run.output
    assert "OutOfMemoryError: no memory" in run.output
    seconds = time.time() - float((tmp_path / "failed").read_text())
    assert seconds < 120, "they would wait for the time limit of 1,200 s"
