"""Group samples of similar length by a batch sampler of one's own."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch


class Buckets:
    """Yields batches of neighbouring samples, from both ends of the data set in turn."""

    def __init__(self, size, batch_size):
        self.size, self.batch_size = size, batch_size

    def __len__(self):
        return self.size // self.batch_size

    def __iter__(self):
        batches = [list(range(i, i + self.batch_size)) for i in range(0, self.size, self.batch_size)]
        while batches:
            yield batches.pop(0)
            if batches:
                yield batches.pop()


plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
loader = DataLoader(dataset, batch_sampler=Buckets(24, 3))

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, nn.CrossEntropyLoss(), loader)
for x, y in loader:
    booster.backward(criterion(model(x), y), optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
