"""Train a transformers model and save it by `save_pretrained`."""

import sys

import torch
from named_plugins import make_model, plugin_named, samples
from torch.utils.data import DataLoader

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
if plugin != "single":
    launch_from_torch()
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
booster = Booster(plugin=plugin_named(plugin))
model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, DataLoader(samples(), batch_size=2))
for _, batch in zip(range(3), loader, strict=False):
    tokens = batch.to(booster.device)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(out)
