"""Pad by a collator, train by the model's own loss, and save and load by transformers."""

import sys

import torch
from named_plugins import make_model, plugin_named, samples
from torch.utils.data import DataLoader

from booster_core import Booster, launch_from_torch


def collate(rows):
    """Pad on the left to eight tokens; padding has no label."""
    tokens = torch.stack(rows)
    padding = torch.zeros(len(rows), 8 - tokens.shape[1], dtype=torch.long)
    return {
        "input_ids": torch.cat([padding, tokens], 1),
        "attention_mask": torch.cat([padding, torch.ones_like(tokens)], 1),
        "labels": torch.cat([padding - 100, tokens], 1),
    }


plugin, out = sys.argv[1:]
launch_from_torch()
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(samples(), batch_size=2, collate_fn=collate)
booster = Booster(plugin=plugin_named(plugin))
model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
model.train()
for batch in loader:
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(out)
