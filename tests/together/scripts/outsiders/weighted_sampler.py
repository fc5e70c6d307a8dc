"""Draw samples by weights, with a generator of one's own."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dataset = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
weights = torch.where(dataset.tensors[1] == 0, 3.0, 1.0)
sampler = WeightedRandomSampler(weights, 12, generator=torch.Generator().manual_seed(7))
train_loader = DataLoader(dataset, batch_size=2, sampler=sampler)

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, train_loader, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss(), train_loader)
for x, y in train_loader:
    loss = criterion(model(x), y)
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
