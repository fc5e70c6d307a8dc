"""Accumulate gradients by `if (i + 1) % 4`, as in plain PyTorch."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(32, 8), torch.randint(3, (32,)))

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=2)
)
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4
    booster.backward(loss, optimizer)
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
booster.save_model(model, out, shard=True)
