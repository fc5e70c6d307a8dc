"""Make a schedule before `boost`, and step it once per epoch."""

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
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
dataset = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, loader, scheduler = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=2), scheduler
)
for _ in range(3):
    for x, y in loader:
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
assert scheduler.get_last_lr() == [0.05 / 8] * 2
booster.save_model(model, out, shard=True)
