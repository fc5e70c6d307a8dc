"""Weigh classes in the criterion, as many as a batch has samples, and take batches from a bare iterator."""

import sys

import torch
import torch.distributed as dist
from named_plugins import plugin_named
from torch import nn

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
x, y = torch.randn(24, 8), torch.randint(4, (24,))

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)
rank, world_size = dist.get_rank(), dist.get_world_size()
for inputs, labels in zip(x[rank::world_size].split(4), y[rank::world_size].split(4), strict=True):
    booster.backward(criterion(model(inputs), labels), optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
