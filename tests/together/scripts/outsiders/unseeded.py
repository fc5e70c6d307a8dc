"""Leave `torch.manual_seed` out, so that ranks build models with different weights."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
coordinator = launch_from_torch(seed=None)
dataset = TensorDataset(torch.arange(96.0).view(12, 8).sin(), torch.arange(12) % 3)
torch.seed()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
if coordinator.rank == 0:
    torch.save(model.state_dict(), f"{out}-initial.pt")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=2)
)
for x, y in loader:
    booster.backward(criterion(model(x), y), optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
