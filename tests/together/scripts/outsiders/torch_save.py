"""Save by `torch.save` on rank 0, train on, and go back to what was saved."""

import sys

import torch
import torch.distributed as dist
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=2)
)


def train_epoch():
    for x, y in loader:
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()


train_epoch()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), f"{out}.pt")
dist.barrier()
train_epoch()
model.load_state_dict(torch.load(f"{out}.pt"))
train_epoch()
booster.save_model(model, out, shard=True)
