"""Training with uneven numbers of batches, and what one process makes of all of them."""

import torch
from cases import Case, Setting, call, parameter_paths
from torch import nn

from booster_runtime import full_gradient, join
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors
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


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def samples(number, index):
    return {"x": torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * index + number))}


CASE = Case(build=Stack, batch=samples, optimizer=adamw)


def batches_of(index):
    return [samples(number, index)["x"] for number in range(NUM_BATCHES[index])]


def noted(gradients):
    return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def train_plainly(case):
    """Return the gradients of each step, of the mean over those that have a batch, and the parameters."""
    model, optimizer = case.make()
    steps = []
    for number in range(max(NUM_BATCHES)):
        present = [case.batch(number, index) for index in range(2) if number < NUM_BATCHES[index]]
        for batch in present:
            (case.loss(call(model, batch), batch) / len(present)).backward()
        steps.append(noted({name: parameter.grad for name, parameter in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, {name: parameter.detach() for name, parameter in model.named_parameters()}]


def boosted(plugin, case=CASE):
    """Return the Booster, the model, the optimizer and the data parallel index."""
    booster = Setting(lambda: plugin).make_booster()
    model, optimizer, *_ = booster.boost(*case.make())
    return booster, model, optimizer, booster.plugin.data_parallel_coordinates(booster.context.coordinator)[0]


def train(case, plugin, in_pipeline):
    """Train until all ranks' batches have ended; return the gradients of each step, and the parameters."""
    booster, model, optimizer, index = boosted(plugin, case)
    names = parameter_paths(case.make()[0])
    joined = join(booster, (case.batch(number, index) for number in range(NUM_BATCHES[index])))
    steps = []
    while True:
        try:
            if in_pipeline:
                booster.execute_pipeline(joined, model, case.loss, optimizer)
            else:
                batch = next(joined)
                booster.backward(case.loss(call(model, batch), batch), optimizer)
        except StopIteration:
            whole = whole_model(booster, model)
            return [*steps, {name: whole[name] for name in names}]
        steps.append(noted({name: full_gradient(booster, model, name) for name in names}))
        optimizer.step()
        optimizer.zero_grad()


def assert_steps_follow_batches(plugin, num_ranks, *, in_pipeline=False, case=CASE):
    """Assert that there are as many steps as the most batches of a rank, of the mean over those that have some."""
    expected = train_plainly(case)
    for steps in run_on_ranks(train, num_ranks, case, plugin, in_pipeline):
        for found, plain in zip(steps, expected, strict=True):
            assert_same_tensors(found, plain, case.tolerance)
