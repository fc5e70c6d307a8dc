"""Train a generator against a discriminator, each with an optimizer, as in PyTorch's DCGAN tutorial."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
net_g = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8))
net_d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=0.01, betas=(0.5, 0.999))
dataset = TensorDataset(torch.randn(12, 8), torch.randn(12, 3))

booster = Booster(plugin=plugin_named(plugin))
net_g, optimizer_g, criterion, dataloader, _ = booster.boost(
    net_g, optimizer_g, nn.BCEWithLogitsLoss(), DataLoader(dataset, batch_size=2)
)
net_d, optimizer_d, *_ = booster.boost(net_d, optimizer_d)
for real, noise in dataloader:
    net_d.zero_grad()
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    booster.backward(criterion(net_d(real), ones), optimizer_d)
    fake = net_g(noise)
    booster.backward(criterion(net_d(fake.detach()), zeros), optimizer_d)
    optimizer_d.step()
    net_g.zero_grad()
    booster.backward(criterion(net_d(fake), ones), optimizer_g)
    optimizer_g.step()
booster.save_model(net_g, f"{out}/generator", shard=True)
booster.save_model(net_d, f"{out}/discriminator", shard=True)
