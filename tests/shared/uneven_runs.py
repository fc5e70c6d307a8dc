"""Training with uneven numbers of batches, and what one process makes of all of them."""

import contextlib

import torch
from cases import Case, Setting, call
from driven_runs import Run, assert_same_steps
from torch import nn

from booster_runtime import join
from booster_testing import run_on_ranks

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


def train_plainly(case):
    """Return what one process notes in steps of the mean over ranks that have a batch."""
    run = Run(case)
    for number in range(max(NUM_BATCHES)):
        present = [case.batch(number, index) for index in range(2) if number < NUM_BATCHES[index]]
        run.backward(sum(case.loss(call(run.model, batch), batch) for batch in present) / len(present))
        run.step()
    return run.steps


def boosted(plugin):
    """Return the Booster, the model, the optimizer and the data parallel index."""
    booster = Setting(lambda: plugin).make_booster()
    model, optimizer, *_ = booster.boost(*CASE.make())
    return booster, model, optimizer, booster.plugin.data_parallel_coordinates(booster.context.coordinator)[0]


def train(case, plugin, in_pipeline):
    """Train until all ranks' batches have ended; return what each step noted."""
    run = Run(case, Setting(lambda: plugin))
    index, _ = run.booster.plugin.data_parallel_coordinates(run.booster.context.coordinator)
    joined = join(run.booster, (case.batch(number, index) for number in range(NUM_BATCHES[index])))
    with contextlib.suppress(StopIteration):
        while True:
            if in_pipeline:
                run.booster.execute_pipeline(joined, run.model, case.loss, run.optimizer)
            else:
                batch = next(joined)
                run.backward(case.loss(call(run.model, batch), batch))
            run.step()
    return run.steps


def assert_steps_follow_batches(plugin, num_ranks, *, in_pipeline=False, case=CASE):
    """Assert that there are as many steps as the most batches of a rank, of the mean over those that have some."""
    assert_same_steps(run_on_ranks(train, num_ranks, case, plugin, in_pipeline), train_plainly(case), case)
