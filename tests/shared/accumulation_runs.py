"""Steps of several micro-batches over two epochs, in one process and under a plugin."""

import torch
from named_plugins import plugin_named
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from booster_core import Booster
from booster_runtime import accumulate
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

NUM_BATCHES, STEPS, PER_BATCH = 5, 2, 4


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def make_data():
    x = torch.randn(NUM_BATCHES * PER_BATCH, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sum(dim=1, keepdim=True).sin()


def mse(outputs, targets):
    return torch.nn.functional.mse_loss(outputs, targets)


def train_plainly():
    """Return parameters after two epochs whose last step has one batch, where others have two."""
    model, (x, y) = make_model(), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        for start in range(0, len(x), STEPS * PER_BATCH):
            part = slice(start, start + STEPS * PER_BATCH)
            mse(model(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


class Own(SequentialSampler):
    """A sampler of the user's, whose order and length only drawing tells."""


class Stream(IterableDataset):
    """The samples, one by one."""

    def __iter__(self):
        return zip(*make_data(), strict=True)


class Shard(Stream):
    """A part of the samples, in batches of the user's own."""

    def __init__(self, num_shards=2, index=None):
        self.num_shards, self.index = num_shards, index

    def shard(self, num_shards, index):
        return Shard(num_shards, index)

    def __iter__(self):
        rows = list(super().__iter__())
        return iter(rows[self.index :: self.num_shards])


def loader_of(kind, batch_size):
    """Return a loader of the samples in their order, of which more or less is known in advance."""
    data = TensorDataset(*make_data())
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(Own(data), batch_size, drop_last=False))
    if kind in ("stream", "shards"):
        return DataLoader(Stream() if kind == "stream" else Shard(), batch_size)
    return DataLoader(data, batch_size, sampler=Own(data) if kind == "sampler" else None)


def train(plugin, kind):
    """Train by `accumulate`; return the number of steps and the parameters."""
    booster, model = Booster(plugin=plugin_named(plugin)), make_model()
    _, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    loader = loader_of(kind, PER_BATCH // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    num_steps = 0
    for _ in range(2):
        for x, y in loader:
            with accumulate(booster, model, STEPS, loader) as is_last:
                booster.backward(mse(model(x), y), optimizer)
            if is_last:
                num_steps += 1
                optimizer.step()
                optimizer.zero_grad()
    return num_steps, whole_model(booster, model)


def assert_accumulates(plugin, kind="map"):
    """Assert that steps are those of large batches, also at the end of an epoch."""
    expected = train_plainly()
    for num_steps, found in run_on_ranks(train, 2, plugin, kind):
        assert num_steps == 6
        assert_same_tensors(found, expected, tolerance_for(torch.float32))
