"""Distil a frozen teacher into a student; each has a Booster and a plugin of its own."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=2)

teacher, *_ = Booster(plugin="ddp").boost(teacher)
booster = Booster(plugin=plugin_named(plugin))
student, optimizer, _, loader, _ = booster.boost(student, optimizer, dataloader=loader)
for (x,) in loader:
    with torch.no_grad():
        target = teacher(x).softmax(-1)
    loss = functional.kl_div(student(x).log_softmax(-1), target, reduction="batchmean")
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(student, out, shard=True)
