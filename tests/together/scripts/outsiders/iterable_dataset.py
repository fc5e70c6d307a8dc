"""Stream samples from an iterable data set."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from booster_core import Booster, launch_from_torch


class Stream(IterableDataset):
    """Makes samples as they are asked for."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(5)
        for index in range(12):
            yield torch.randn(8, generator=generator), index % 3


plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(Stream(), batch_size=2)
)
for _ in range(2):
    for x, y in loader:
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
booster.save_model(model, out, shard=True)
