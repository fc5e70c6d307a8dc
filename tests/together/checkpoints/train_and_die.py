"""A training for `test_interrupted_runs`: resumes by itself, and can end one of its ranks after chosen steps.

    torchrun ... train_and_die.py PLUGIN ROOT STEPS SAVE_EVERY [STEP:RANK[:stop] ...]

A rank kills itself; with ``:stop`` it gets SIGTERM, as a scheduler of jobs sends it.

Rank 0 appends the loss of each step to ``ROOT/losses``, as bits: a repeated step has a second line.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from booster_core import Booster, launch_from_torch
from booster_runtime import StopSignal


def kill_once(root, step, rank, kills):
    """Kill this process after a step, where it is told to and no earlier attempt was killed there."""
    if f"{step}:{rank}:stop" in kills:
        os.kill(os.getpid(), signal.SIGTERM)
    note = root / f"killed-{step}"
    if f"{step}:{rank}" in kills and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(plugin, root, steps, save_every, *kills):
    root, steps, save_every = Path(root), int(steps), int(save_every)
    coordinator = launch_from_torch(seed=1, timeout_seconds=60, verbose=False)
    torch.manual_seed(1 + coordinator.rank)
    booster = Booster(plugin=plugin)
    data = torch.randn(64, 9, generator=torch.Generator().manual_seed(2))
    loader = booster.prepare_dataloader(TensorDataset(data[:, :8], data[:, 8:]), 4, shuffle=True, drop_last=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, criterion, loader, scheduler = booster.boost(model, optimizer, nn.MSELoss(), loader, scheduler)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    step = booster.load_checkpoint(root, **state).step if booster.has_checkpoint(root) else 0
    with StopSignal(booster) as stop:
        while step < steps:
            for x, y in loader:
                loss = criterion(model(x), y)
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if coordinator.is_master():
                    with (root / "losses").open("a") as file:
                        file.write(f"{step} {mean.item().hex()}\n")
                is_over = stop.requested()
                if step % save_every == 0 or step == steps or is_over:
                    booster.save_checkpoint(root, step=step, **state, keep_last=2)
                kill_once(root, step, coordinator.rank, kills)
                if is_over:
                    coordinator.print_on_master(f"stopped and saved after step {step}")
                    return
                if step == steps:
                    break


if __name__ == "__main__":
    main(*sys.argv[1:])
