"""Create the optimizer after `boost` from the boosted model's parameters, and step it directly."""

import sys

import torch
from named_plugins import make_model, plugin_named, samples
from torch.utils.data import DataLoader

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
booster = Booster(plugin=plugin_named(plugin))
model, _, _, loader, _ = booster.boost(make_model(), dataloader=DataLoader(samples(), batch_size=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _, batch in zip(range(3), loader, strict=False):
    tokens = batch.to(booster.device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
