"""Forget to launch."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster

plugin, out = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))
booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=2)
)
for x, y in loader:
    booster.backward(criterion(model(x), y), optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
