"""Train in replica groups that survive each other: a group may die at any time, and come back.

Four groups of one process each on this machine, of which one is killed at step 20 and started again:

    booster run --groups 4 examples/fault_tolerant.py --kill 2

Across machines, start `booster lighthouse` on one of them, and on each machine a group of 8 processes:

    export TORCHFT_LIGHTHOUSE=http://first-machine:29510 NUM_REPLICA_GROUPS=4 REPLICA_GROUP_ID=0
    torchrun --standalone --nproc-per-node 8 --max-restarts 100 examples/fault_tolerant.py --inner fsdp
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch
from booster_ft import FaultTolerantPlugin


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", default="ddp", help="the plugin inside of each group")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill", type=int, help="number of a group that kills itself at step 20, once")
    parser.add_argument("--out", type=Path, default=Path("runs/fault_tolerant"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    coordinator = launch_from_torch(timeout_seconds=60, verbose=False)
    plugin = FaultTolerantPlugin(inner=args.inner, min_replicas=1, timeout_seconds=10)
    booster = Booster(plugin=plugin)
    group = plugin.config.replica_id

    # The same in every group: seeded alike by the launch, of the same data.
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(20_000, 8)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    # The loader is split between all ranks of all groups.
    model, optimizer, criterion, data, scheduler = booster.boost(model, optimizer, nn.MSELoss(), data, scheduler)

    killed = args.out / "killed"
    for inputs, targets in data:
        if plugin.step == args.steps:
            break
        loss = criterion(model(inputs), targets)  # a group that came back has the others' state from here on
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()  # averages over the groups that are there; takes the step if all have the average
        optimizer.zero_grad()
        scheduler.step()
        coordinator.print_on_master(
            f"group {group}: step {plugin.step}, {plugin.groups.num_participants} group(s), loss {loss:.3f}"
        )
        if group == args.kill and plugin.step == 20 and not killed.exists():
            killed.parent.mkdir(parents=True, exist_ok=True)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.25)  # a step of a larger model, so that there is time to come back
    booster.save_model(model, args.out / f"group{group}", shard=True)


if __name__ == "__main__":
    main()
