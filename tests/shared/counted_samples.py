"""Samples that tell their number, counted in training and evaluation."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime import gather_for_metrics

COUNT = 9


class Features(torch.utils.data.Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index, torch.full((4,), index / COUNT)


class FeatureStream(IterableDataset):
    def __iter__(self):
        return (Features()[index] for index in range(COUNT))


def model_of():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def evaluate(plugin, is_stream, how):
    booster = Booster("cpu", plugin=plugin)
    data = FeatureStream() if is_stream else Features()
    plain = DataLoader(data, batch_size=4) if how == "boost" else None
    module = model_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _, _, loader, _ = booster.boost(module, optimizer, None, plain)
    if loader is None:
        loader = booster.prepare_dataloader(data, 4)
    model.eval()
    gathered = []
    with torch.no_grad():
        for indices, x in loader:
            gathered.append(gather_for_metrics(booster, {"indices": indices, "scores": model(x)}, loader))
    return {name: torch.cat([each[name] for each in gathered]) for name in ("indices", "scores")}


def train_after_a_peek(plugin, peeks, resets=False):
    """Train in step for two epochs, after some ranks took one batch to look at it."""
    booster = Booster("cpu", plugin=plugin)
    loader = DataLoader(Features(), batch_size=1, shuffle=True)
    module = model_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, _, loader, _ = booster.boost(module, optimizer, None, loader)
    if DistCoordinator().rank in peeks:
        next(iter(loader))
    if resets:
        loader.set_epoch(0)
    seen = []
    for _ in range(2):
        for indices, x in loader:
            booster.backward(model(x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            seen += indices.tolist()
    return seen
