"""Write the loop of Fabric's tutorial, with the calls that Booster has under another name."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
fabric = Booster(plugin=plugin_named(plugin))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, _, dataloader, _ = fabric.boost(
    model, optimizer, dataloader=DataLoader(TensorDataset(torch.randn(12, 8), torch.randint(3, (12,))), batch_size=2)
)
model.train()
for x, y in dataloader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    fabric.backward(loss)
    optimizer.step()
fabric.save_model(model, out, shard=True)
