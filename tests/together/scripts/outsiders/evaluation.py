"""Evaluate after each epoch, with a metric that is summed over ranks as users of DistributedDataParallel do."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
train = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))
test = TensorDataset(torch.randn(8, 8), torch.randint(3, (8,)))

booster = Booster(plugin=plugin_named(plugin))
model, optimizer, criterion, train_loader, _ = booster.boost(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(train, batch_size=2)
)
test_loader = booster.prepare_dataloader(test, batch_size=2)
losses = []
for _ in range(2):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            total += torch.tensor([float(criterion(model(x), y)) * len(y), len(y)])
    dist.all_reduce(total)
    losses.append(float(total[0] / total[1]))
booster.save_model(model, out, shard=True)
if dist.get_rank() == 0:
    Path(out, "metrics.json").write_text(json.dumps(losses))
