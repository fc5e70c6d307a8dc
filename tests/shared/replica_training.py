"""One rank of a replica group that trains a small model, and writes what it saw in each step; see `replica_groups`.

`python replica_training.py '{"save": 3, ...}'`, with the environment of torchrun and of the groups.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from booster_core import Booster, launch
from booster_core.state import as_bytes
from booster_ft import FaultTolerantPlugin

DEFAULTS = {"plugin": {}, "sleep": 0.1, "save": 0, "together": 0, "width": 16}


class Rank:
    """What a rank trains, and its log.

    Args:
        options: As given to the script.
    """

    def __init__(self, options):
        self.options = options
        self.folder = Path(options["log"])
        self.log = self.folder / f"group{os.environ['REPLICA_GROUP_ID']}-rank{os.environ['RANK']}.jsonl"
        self.end = self.folder / "end"
        settings = {"timeout_seconds": 10, **options["plugin"]}
        self.plugin = FaultTolerantPlugin(inner="ddp", **settings)
        self.booster = Booster(plugin=self.plugin)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, options["width"]), nn.Tanh(), nn.LayerNorm(options["width"]))
        model.append(nn.Linear(options["width"], 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(40_000, 8, dtype=torch.float64)
        loader = DataLoader(x, batch_size=4, shuffle=True)
        objects = self.booster.boost(model, optimizer, None, loader, StepLR(optimizer, 20, gamma=0.9))
        self.model, self.optimizer, _, self.loader, self.scheduler = objects

    def say(self, **facts):
        """Write a line into the log."""
        with self.log.open("a") as stream:
            stream.write(json.dumps({"time": time.time(), "pid": os.getpid(), **facts}) + "\n")

    def goes_on(self):
        """Return whether another step is to be taken."""
        return not self.end.exists() or self.plugin.step < int(self.end.read_text())

    def train(self):
        """Train until the run has committed its steps."""
        for x in self.loader:
            if not self.goes_on():
                return
            while (self.folder / f"hold{self.plugin.config.replica_id}").exists():
                time.sleep(0.01)
            began, step = time.time(), self.plugin.step
            loss = (self.model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
            self.booster.backward(loss, self.optimizer)
            step = self.plugin.step
            self.optimizer.step()
            committed, seconds = self.plugin.step > step, time.time() - began
            self.optimizer.zero_grad()
            self.scheduler.step()
            adapter, state = self.booster.state_adapter(self.model), hashlib.sha256()
            for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
                state.update(as_bytes(shard.data.contiguous()))
            about = {"step": step, "committed": committed, "seconds": seconds, "state": state.hexdigest()}
            self.say(event="step", **about, lr=self.optimizer.param_groups[0]["lr"])
            if self.options["save"] and committed and self.plugin.step % self.options["save"] == 0:
                self.save()
            time.sleep(self.options["sleep"])

    def save(self):
        """Save a checkpoint of this group."""
        self.booster.save_checkpoint(
            self.folder / f"checkpoint-group{self.plugin.config.replica_id}",
            step=self.plugin.step,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            keep_last=2,
        )


def main():
    """Train as the options say."""
    options = {**DEFAULTS, **json.loads(sys.argv[1])}
    launch(verbose=False, timeout_seconds=30)
    rank = Rank(options)
    if options["together"]:
        rank.plugin.groups.join()  # a quorum waits for those that are known
    rank.say(event="boosted")
    pattern = f"*-rank{os.environ['RANK']}.jsonl"
    while len(list(rank.folder.glob(pattern))) < options["together"]:
        time.sleep(0.01)
    rank.train()


if __name__ == "__main__":
    main()
