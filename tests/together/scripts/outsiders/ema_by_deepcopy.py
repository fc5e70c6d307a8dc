"""Keep a moving average in a deep copy of the model, and save that."""

import copy
import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
coordinator = launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=2)
)
ema = copy.deepcopy(model).eval()
for x, y in loader:
    booster.backward(criterion(model(x), y), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for averaged, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            averaged.lerp_(parameter, 0.1)
if coordinator.rank == 0:
    torch.save(ema.state_dict(), f"{out}.pt")
