"""One rank of a replica group that trains a small model, and writes what it saw in each step; see `replica_groups`.

`python replica_training.py '{"inner": "zero", "steps": 20, ...}'`, with the environment of torchrun and of the groups.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster_core import Booster, launch
from booster_ft import FaultTolerantPlugin

DEFAULTS: dict[str, Any] = {
    "inner": "ddp",
    "inner_options": {},
    "plugin": {},
    "steps": 20,
    "accumulate": 1,
    "clip": None,
    "precision": None,
    "optimizer": "AdamW",
    "lr": 0.01,
    "sleep": 0.0,
    "samples": 4096,
    "scheduler": False,
    "dtype": "float64",
    "save": None,
    "gradients": False,
    "overflow": None,
    "unused": None,
    "unseeded": False,
    "width": 16,
    "together": 0,
}
BATCH = 4


class Net(nn.Module):
    """Layers of which one may be left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, width)
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 1)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if not self.skips:
            x = torch.tanh(self.second(x))
        return self.last(self.norm(x))


def samples(count: int, dtype: torch.dtype) -> torch.utils.data.TensorDataset:
    """Return a data set whose samples can be told apart."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 8, generator=generator, dtype=torch.float64).to(dtype)
    return torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True), torch.arange(count))


def digest_of(tensors: Any) -> str:
    """Return a digest of tensors' bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def build(options: dict[str, Any]) -> tuple[Net, torch.optim.Optimizer, Any]:
    """Return the model, its optimizer and perhaps a scheduler, as every group makes them."""
    torch.manual_seed(int(time.time_ns() % 2**31) if options["unseeded"] else 3)
    model = Net(options["width"]).to(getattr(torch, options["dtype"]))
    optimizer = getattr(torch.optim, options["optimizer"])(model.parameters(), lr=options["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7) if options["scheduler"] else None
    return model, optimizer, scheduler


def main() -> None:
    """Train until the run has committed the steps."""
    options = {**DEFAULTS, **json.loads(sys.argv[1])}
    log = Path(options["log"]) / f"group{os.environ['REPLICA_GROUP_ID']}-rank{os.environ['RANK']}.jsonl"
    rank, dtype = int(os.environ["RANK"]), getattr(torch, options["dtype"])

    def say(**facts: Any) -> None:
        with log.open("a") as stream:
            stream.write(json.dumps({"time": time.time(), "pid": os.getpid(), **facts}) + "\n")

    launch(verbose=False, timeout_seconds=30)
    plugin = FaultTolerantPlugin(
        inner=options["inner"], inner_options=options["inner_options"], timeout_seconds=10, **options["plugin"]
    )
    booster = Booster(plugin=plugin, mixed_precision=options["precision"])
    model, optimizer, scheduler = build(options)
    loader = torch.utils.data.DataLoader(samples(options["samples"], dtype), batch_size=BATCH, shuffle=True)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    adapter = booster.state_adapter(model)
    if options["together"]:
        _ = plugin.groups.manager  # a quorum waits for those that are known
    say(event="boosted")
    while len(list(log.parent.glob(f"*-rank{rank}.jsonl"))) < options["together"]:
        time.sleep(0.01)
    end = log.parent / "end"

    def goes_on() -> bool:
        return plugin.step < (int(end.read_text() or 0) if end.exists() else options["steps"])

    while goes_on():
        batches = iter(loader)
        while goes_on():
            began = time.time()
            seen, loss = [], torch.zeros(())
            for number in range(options["accumulate"]):
                batch = next(batches, None)
                if batch is None:
                    break
                x, y, index = batch
                seen.append(index.tolist())
                if options["unused"] == [plugin.config.replica_id, plugin.step]:
                    booster.unwrap(model).skips = True
                scale = 1e30 if options["overflow"] == [plugin.config.replica_id, plugin.step] else 1.0
                sync = booster.no_sync(model) if number + 1 < options["accumulate"] else _nothing()
                with sync:
                    loss = (model(x).double() - y.double()).pow(2).mean() * scale / options["accumulate"]
                    booster.backward(loss.float() if options["precision"] else loss, optimizer)
            if batch is None:
                break
            step, facts = plugin.step, {}
            if options["clip"] is not None:
                facts["norm"] = float(optimizer.clip_grad_by_norm(options["clip"]))
            if options["gradients"]:
                names = [name for name, _ in booster.unwrap(model).named_parameters()]
                found = {name: plugin.full_gradient(model, name) for name in names}
                facts["gradients"] = {name: None if g is None else g.tolist() for name, g in found.items()}
            optimizer.step()
            scale = optimizer.loss_scaler.scale if optimizer.loss_scaler else None
            facts |= {
                "skipped": optimizer.found_overflow,
                "scale": scale,
                "participants": plugin.groups.num_participants,
            }
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            committed = plugin.step > step
            state = [shard.data for shard in (*adapter.model_shards(), *adapter.optimizer_shards())]
            facts |= {"model": digest_of(shard.data for shard in adapter.model_shards()), "state": digest_of(state)}
            facts |= {"lr": optimizer.param_groups[0]["lr"], "random": torch.initial_seed()}
            say(
                event="step",
                step=step,
                committed=committed,
                seconds=time.time() - began,
                samples=seen,
                loss=float(loss.detach()),
                **facts,
            )
            if options["save"] and committed and plugin.step % options["save"] == 0:
                folder = Path(options["log"]) / f"checkpoint-group{plugin.config.replica_id}"
                booster.save_checkpoint(folder, model, optimizer, step=plugin.step, lr_scheduler=scheduler, keep_last=2)
                say(event="saved", step=plugin.step)
            time.sleep(options["sleep"])
    say(event="end", rank=rank, commits=plugin.groups.num_commits, parameters=[p.tolist() for p in _whole(adapter)])


def _whole(adapter: Any) -> list[torch.Tensor]:
    return [shard.data.double() for shard in adapter.model_shards() if shard.flat is None]


class _nothing:  # noqa: N801
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    main()
