"""Give the model a `training_step` that calls itself, as a LightningModule has."""

import sys

import torch
from named_plugins import plugin_named
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from booster_core import Booster, launch_from_torch


class LitModel(nn.Module):
    """A classifier that computes its own loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x):
        """Return logits."""
        return self.net(x)

    def training_step(self, batch, batch_idx):
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


plugin, out = sys.argv[1:]
launch_from_torch()
torch.manual_seed(0)
model = LitModel()
optimizer = model.configure_optimizers()
dataset = TensorDataset(torch.randn(12, 8), torch.randint(3, (12,)))
booster = Booster(plugin=plugin_named(plugin))
model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=DataLoader(dataset, batch_size=2))
for batch_idx, batch in enumerate(loader):
    loss = model.training_step(batch, batch_idx)
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
