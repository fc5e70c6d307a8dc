"""Use the boosted model as DeepSpeed's engine."""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))

booster = Booster(plugin=plugin_named(plugin))
model_engine, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=DataLoader(dataset, batch_size=2))
for x, y in loader:
    loss = nn.functional.cross_entropy(model_engine(x), y)
    model_engine.backward(loss)
    model_engine.step()
booster.save_model(model_engine, out, shard=True)
