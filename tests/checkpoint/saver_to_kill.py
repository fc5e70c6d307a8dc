"""Kills two ranks again and again while they save, and loads after each kill; prints what it found as JSON.

A program of its own because it forks: torch is imported once, and each life of the two ranks costs a fraction of a
second. Every tensor of step ``n`` holds ``n``, so that a mixture of two steps cannot go unnoticed.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from booster_checkpoint.run.manifest import verify_folder
from booster_core import Booster
from booster_core.ranks.world import close_world, open_world

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from reference_plugins import ReferencePlugin

WIDTH = 40_000
LAST = 1_000_000
RULES = {"keep_last": 2, "keep_every": 50, "keep_best": 1}


def make(plugin):
    booster = Booster("cpu", None, plugin)
    module = nn.Linear(2, WIDTH)
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


def live(rank, folder, life, use_async):
    """Save one step after the other until somebody kills this process."""
    store = dist.FileStore(str(folder / f"store-{life}"), 2)
    open_world(store, rank=rank, world_size=2, local_rank=rank, backend="gloo", timeout_seconds=60)
    booster, model, optimizer = make(ReferencePlugin())
    root = folder / "root"
    step = booster.load_checkpoint(root, model=model, optimizer=optimizer, resume=True).step
    (folder / f"ready-{life}-{rank}").touch()
    while step < LAST:
        step += 1
        fill(tensors(model, optimizer), step)
        booster.save_checkpoint(
            root, step=step, model=model, optimizer=optimizer, extra={"n": step}, **RULES, metric=-step % 7,
            use_async=use_async,
        )  # fmt: skip
        if rank == 0 and not use_async:
            with (folder / "saved").open("a") as notes:  # one short append, which a kill cannot cut in two
                notes.write(f"{step}\n")


def wait_for(paths, seconds=60):
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            sys.exit("the ranks did not start")
        time.sleep(0.005)


def seconds_of_a_save(folder):
    """Wait for the first save and return how long it took; on a busy machine it is much longer than on an idle one."""
    begin = time.monotonic()
    while (folder / "saved").read_text() == "0\n":
        if time.monotonic() > begin + 60:
            sys.exit("the ranks did not save")
        time.sleep(0.005)
    return time.monotonic() - begin


def kill(pids, victims):
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    if len(victims) < len(pids):
        time.sleep(0.15)  # what the others do now may do no harm either
    for pid in set(pids) - set(victims):
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def look(folder, prefix=""):
    """Load what is there, in this process, as a restarted run does, and return its step and what is wrong with it."""
    root = folder / "root"
    booster, model, optimizer = make(None)
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


def main(folder, seed, lives):
    chance = random.Random(seed)
    found = []
    (folder / "saved").write_text("0\n")
    for life in range(lives):
        use_async = life % 3 == 2
        pids = []
        for rank in (0, 1):
            pid = os.fork()
            if pid == 0:
                try:
                    live(rank, folder, life, use_async)
                finally:
                    os._exit(1)
            pids.append(pid)
        wait_for([folder / f"ready-{life}-{rank}" for rank in (0, 1)])
        if life == 0:
            longest = max(0.5, 4 * seconds_of_a_save(folder))
        time.sleep(chance.uniform(0.0, longest))
        victims = [pids, pids[:1], pids[1:]][life % 3] if not use_async else chance.choice([pids, pids[:1], pids[1:]])
        kill(pids, victims)
        left = [path.name for path in (folder / "root").glob(".*")] if (folder / "root").exists() else []
        step, wrong = look(folder)
        saved = int((folder / "saved").read_text().split()[-1])
        found.append({"step": step, "saved": saved, "wrong": wrong, "left": left, "victims": len(victims)})
    booster, model, optimizer = make(None)
    booster.save_checkpoint(folder / "root", step=LAST, model=model, optimizer=optimizer, keep_last=1)
    close_world()
    print(json.dumps({"lives": found, "in_the_end": sorted(path.name for path in (folder / "root").iterdir())}))
    shutil.rmtree(folder / "root")


OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


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
        save(make(None), 1)
        pid = os.fork()
        if pid == 0:
            try:
                job = make(None)  # another process is another job, which takes over first
                die_at(number, root)
                save(job, 2)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        is_killed = os.WIFSIGNALED(status)
        found.append(look_at())
    print(json.dumps({"lives": found, "exit": os.WEXITSTATUS(status)}))


def kill_at_each_operation(folder, prefix):
    """Kill over a save that replaces and prunes steps.

    With a prefix such as ``local://``, the root is a URL; what a storage does there are the same operations.
    """
    root = folder / "root"

    def save(job, step):
        booster, model, optimizer = job
        fill(tensors(model, optimizer), step)
        options = {"extra": {"n": step}, "keep_last": 1, "keep_best": 1, "metric": -step}
        booster.save_checkpoint(f"{prefix}{root}", step=step, model=model, optimizer=optimizer, **options)

    def look_at():
        step, wrong = look(folder, prefix)
        return {"step": step, "wrong": wrong}

    kill_in_turn(root, save, look_at)


def kill_while_a_dcp_folder_is_replaced(folder):
    """Kill over a save that replaces a folder of torch's."""
    target = folder / "root" / "m"

    def save(job, value):
        booster, model, _ = job
        fill(model.unwrap().parameters(), value)
        booster.save_model(model, target, gather_dtensor=False)

    def look_at():
        job = booster, model, _ = make(None)
        booster.load_model(model, target)
        values = {float(value) for parameter in model.unwrap().parameters() for value in parameter.unique()}
        save(job, 3)
        left = [path.name for path in (*target.parent.iterdir(), *target.iterdir())]
        return {"values": sorted(values), "left": sorted(left)}

    kill_in_turn(target.parent, save, look_at)


if __name__ == "__main__":
    if sys.argv[2] == "dcp":
        WIDTH = 100
        kill_while_a_dcp_folder_is_replaced(Path(sys.argv[1]))
    elif sys.argv[2] == "each":
        WIDTH = 100
        kill_at_each_operation(Path(sys.argv[1]), sys.argv[3])
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
