"""Kills a process before each of its file operations while it saves, and loads after each kill; prints what it found.

A program of its own because it forks: torch is imported once, and each life costs a fraction of a second. Every tensor
of step ``n`` holds ``n``, so that a mixture of two steps cannot go unnoticed.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from booster_checkpoint.run.manifest import verify_folder
from booster_core import Booster

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def make():
    booster, module = Booster("cpu"), nn.Linear(2, 100)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    model, optimizer, *_ = booster.boost(module, optimizer)
    return booster, model, optimizer


def tensors(model, optimizer):
    return [
        *model.unwrap().parameters(),
        *(state["momentum_buffer"] for state in optimizer.unwrap().state.values()),
    ]


@torch.no_grad()
def fill(values, step):
    for tensor in values:
        tensor.fill_(step)


def look(root, prefix=""):
    """Load what is there, in this process, as a restarted run does, and return its step and what is wrong with it."""
    booster, model, optimizer = make()
    loaded = booster.load_checkpoint(f"{prefix}{root}", model=model, optimizer=optimizer, resume=True)
    if not loaded.path:
        return 0, [f"'{path}' was not loaded" for path in root.glob("step-*")]
    wrong = [f"extra is {loaded.extra}"] if loaded.extra != {"n": loaded.step} else []
    wrong += [f"a tensor is not {loaded.step}" for t in tensors(model, optimizer) if not bool((t == loaded.step).all())]
    latest = (root / "latest").read_text().strip() if (root / "latest").exists() else None
    for path in root.glob("step-*"):
        if path.name == latest:
            verify_folder(path)
    if not wrong and latest is not None and loaded.step != int(latest.removeprefix("step-").partition(".")[0]):
        wrong.append(f"latest is {latest}, loaded {loaded.step}")
    return loaded.step, wrong


def die_at(number, root):
    """Let this process be killed right before its operation of this number on files below a root."""
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event in OPERATIONS and str(root) in str(arguments):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def kill_in_turn(root, save, look_at):
    """Kill one process before each of its file operations in turn, over a second save; print what is found after each.

    Args:
        root: Where it saves.
        save: Saves what a job holds, filled with a value.
        look_at: Returns what is found after a kill.
    """
    found, number, is_killed = [], 0, True
    while is_killed:
        number += 1
        shutil.rmtree(root, ignore_errors=True)
        save(make(), 1)
        pid = os.fork()
        if pid == 0:
            try:
                job = make()  # another process is another job, which takes over first
                die_at(number, root)
                save(job, 2)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        is_killed = os.WIFSIGNALED(status)
        found.append(look_at())
    print(json.dumps({"lives": found, "exit": os.WEXITSTATUS(status)}))


def kill_at_each_operation(root, prefix, use_async):
    """Kill over a save that replaces and prunes steps.

    With a prefix such as ``local://``, the root is a URL; what a storage does there are the same operations.
    """

    def save(job, step):
        booster, model, optimizer = job
        fill(tensors(model, optimizer), step)
        options = {"extra": {"n": step}, "keep_last": 1, "keep_best": 1, "metric": -step}
        options["use_async"] = use_async and step == 2  # a fork has no thread of the first save
        booster.save_checkpoint(f"{prefix}{root}", step=step, model=model, optimizer=optimizer, **options)
        booster.wait()

    def look_at():
        step, wrong = look(root, prefix)
        return {"step": step, "wrong": wrong}

    kill_in_turn(root, save, look_at)


def kill_while_a_dcp_folder_is_replaced(root):
    """Kill over a save that replaces a folder of torch's."""
    target = root / "m"

    def save(job, value):
        booster, model, _ = job
        fill(model.unwrap().parameters(), value)
        booster.save_model(model, target, gather_dtensor=False)

    def look_at():
        job = booster, model, _ = make()
        booster.load_model(model, target)
        values = {float(value) for parameter in model.unwrap().parameters() for value in parameter.unique()}
        save(job, 3)
        left = [path.name for path in (*root.iterdir(), *target.iterdir())]
        return {"values": sorted(values), "left": sorted(left)}

    kill_in_turn(root, save, look_at)


if __name__ == "__main__":
    if sys.argv[2] == "dcp":
        kill_while_a_dcp_folder_is_replaced(Path(sys.argv[1]))
    else:
        kill_at_each_operation(Path(sys.argv[1]), sys.argv[3], use_async=sys.argv[2] == "async")
