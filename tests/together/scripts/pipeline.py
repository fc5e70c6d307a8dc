"""Train a pipeline and save it by `save_pretrained`."""

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
model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, DataLoader(dataset, batch_size=2))
batches = iter(loader)
for _ in range(3):
    booster.execute_pipeline(batches, model, lambda outputs, _: outputs.loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(out)
