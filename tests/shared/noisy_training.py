"""A data set, a model and an optimizer that draw and keep more than training needs, as users write them."""

import random

import numpy as np
import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    """Items with noise from the global generators and from generators of the data set's own; counts what was read."""

    def __init__(self):
        self.own = np.random.default_rng(3)
        self.reads = 0

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.reads += 1
        noise = random.random() + np.random.rand() + float(torch.rand(())) + self.own.random()  # noqa: NPY002
        return torch.full((8,), index + noise), index % 3


class Net(nn.Module):
    """Has dropout and buffers that training changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.3),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class Remembering(torch.optim.SGD):
    """Keeps something besides groups and state, as users' optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.9)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        self.param_groups[0]["weight_decay"] = 0.01 * self.calls
        return super().step(closure)
