"""Training with uneven numbers of batches, and what one process makes of all of them."""

import torch
from torch import nn

from booster_core import Booster
from booster_runtime import join
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model

NUM_BATCHES = (2, 5)
"""Of each data parallel rank."""


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make():
    torch.manual_seed(0)
    model = Stack()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches_of(index):
    generator = torch.Generator().manual_seed(10 + index)
    return [torch.randn(2, 8, generator=generator) for _ in range(NUM_BATCHES[index])]


def square(outputs, _):
    return outputs.square().mean()


def train_plainly():
    model, optimizer = make()
    for number in range(max(NUM_BATCHES)):
        present = [batches_of(index)[number] for index in range(2) if number < NUM_BATCHES[index]]
        (sum(square(model(x), None) for x in present) / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def boosted(plugin):
    """Return the Booster, the model, the optimizer and the data parallel index."""
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(*make())
    return booster, model, optimizer, booster.plugin.data_parallel_coordinates(booster.context.coordinator)[0]


def train(plugin, in_pipeline):
    """Train until all ranks' batches have ended; return the number of steps and the parameters."""
    booster, model, optimizer, index = boosted(plugin)
    joined = join(booster, ({"x": x} for x in batches_of(index)))
    count = 0
    while True:
        try:
            if in_pipeline:
                booster.execute_pipeline(joined, model, square, optimizer)
            else:
                booster.backward(square(model(**next(joined)), None), optimizer)
        except StopIteration:
            return count, whole_model(booster, model)
        optimizer.step()
        optimizer.zero_grad()
        count += 1


def assert_steps_follow_batches(plugin, num_ranks, *, in_pipeline):
    """Assert that there are as many steps as the most batches of a rank, of the mean over those that have some."""
    for count, found in run_on_ranks(train, num_ranks, plugin, in_pipeline):
        assert count == max(NUM_BATCHES)
        assert_same_tensors(found, train_plainly(), tolerance_for(torch.float32))
