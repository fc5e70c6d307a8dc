"""Draw the same batch on every rank, because all have the same seed."""

import sys

import torch
from named_plugins import make_model, plugin_named, samples

from booster_core import Booster, launch_from_torch

plugin, out = sys.argv[1:]
launch_from_torch()
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
booster = Booster(plugin=plugin_named(plugin))
model, optimizer, *_ = booster.boost(model, optimizer)
for batch in samples()[:6].split(2):
    tokens = batch.to(booster.device)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
booster.save_model(model, out, shard=True)
