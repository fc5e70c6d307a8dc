"""Train with automatic resumption after a crash; the result is the same as without the crash.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/resume_training.py --plugin ddp --crash-at 13

Every few steps the whole training state is saved in the background. If a process dies, torchrun restarts all of them;
they find the last checkpoint and continue from it, with the same order of samples, dropout masks and losses.
``--crash-at`` makes rank 0 kill itself once, to show this; leave it out in your own runs, which may be stopped at any
moment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from booster_core import Booster, launch_from_torch


def make_data(samples: int = 256) -> TensorDataset:
    """Return points on a noisy spiral and their angle."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(samples, 1, generator=generator) * 6
    points = angle * torch.cat([angle.cos(), angle.sin()], dim=1) + torch.randn(samples, 2, generator=generator) / 10
    return TensorDataset(points, angle)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", help="name of an installed plugin; 'ddp' on several ranks, else none")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path("runs/resume_training"), help="folder of all checkpoints")
    parser.add_argument("--crash-at", type=int, help="kill rank 0 once, after this step")
    return parser.parse_args()


def crash_once(root: Path) -> None:
    """Kill this process, unless a previous attempt was killed."""
    note = root / "crashed"
    if not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = parse_arguments()
    coordinator = launch_from_torch(seed=1, timeout_seconds=60)
    torch.manual_seed(1 + coordinator.rank)  # different dropout masks on each rank
    plugin = args.plugin or ("ddp" if coordinator.world_size > 1 else None)
    booster = Booster(plugin=plugin)

    loader = booster.prepare_dataloader(make_data(), 8, shuffle=True, drop_last=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer, criterion, loader, scheduler = booster.boost(model, optimizer, nn.MSELoss(), loader, scheduler)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}

    loaded = booster.load_checkpoint(args.root, resume=True, **state)
    step, losses = loaded.step, loaded.extra["losses"] if loaded.step else []
    if step:
        coordinator.print_on_master(f"resumed after step {step}, from {loaded.path}")

    while step < args.steps:
        for points, angle in loader:
            loss = criterion(model(points), angle)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            losses.append(mean_over_ranks(loss))
            if step % args.save_every == 0 or step == args.steps:
                extra = {"losses": losses}
                booster.save_checkpoint(args.root, step=step, **state, extra=extra, keep_last=2, use_async=True)
            if step == args.crash_at and coordinator.is_master():
                crash_once(args.root)
            if step == args.steps:
                break
    booster.wait()
    if coordinator.is_master():
        (args.root / "losses.json").write_text(json.dumps(losses))
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {step} steps")


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of a scalar over all ranks."""
    value = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


if __name__ == "__main__":
    main()
