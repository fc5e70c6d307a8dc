"""Call the model that was passed to `boost` instead of the returned one."""

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
boosted, optimizer, _, loader, _ = booster.boost(model, optimizer, None, DataLoader(samples(), batch_size=2))
for batch in loader:
    tokens = batch.to(booster.device)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(boosted, out, shard=True)
