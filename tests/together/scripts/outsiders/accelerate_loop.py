"""Write the loop of Accelerate's tutorial."""

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

accelerator = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, _ = accelerator.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=2)
)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = criterion(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.wait_for_everyone()
accelerator.save_model(model, out)
