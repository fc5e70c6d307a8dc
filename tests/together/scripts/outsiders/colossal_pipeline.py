"""Call `execute_pipeline` whatever the plugin, as in a copied Colossal-AI script."""

import sys

import torch
from named_plugins import make_model, plugin_named, samples
from torch.utils.data import DataLoader

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
booster = Booster(plugin=plugin_named(plugin))
dataset = [{"input_ids": row, "labels": row} for row in samples()]
model, optimizer, _criterion, dataloader, _ = booster.boost(
    model, optimizer, lambda outputs, inputs: outputs.loss, DataLoader(dataset, batch_size=2)
)
train_dataloader_iter = iter(dataloader)
for _ in range(3):
    outputs = booster.execute_pipeline(train_dataloader_iter, model, _criterion, optimizer, return_loss=True)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
