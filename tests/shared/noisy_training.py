"""A data set, a model and an optimizer that draw and keep more than training needs, as users write them."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from booster_core import Booster
from booster_core.plugin import hookimpl, register_hooks, unregister_hooks
from booster_tools import verify_objects


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


class Stream(IterableDataset):
    """Goes on where the pass before has stopped."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        for _ in range(8):
            self.position += 1
            yield torch.full((8,), float(self.position)), self.position % 3


def loaders():
    data = Samples()
    sampler = WeightedRandomSampler([1.0] * 16, 8, generator=torch.Generator().manual_seed(4))
    return {
        "shuffled": DataLoader(data, batch_size=2, shuffle=True),
        "generator": DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5)),
        "sampler": DataLoader(data, batch_size=2, sampler=sampler),
        "stream": DataLoader(Stream(), batch_size=2),
    }


class Watch:
    """Notes optimizer steps."""

    def __init__(self, steps):
        self.steps = steps

    @hookimpl
    def after_step(self, optimizer):
        self.steps.append(optimizer)


def trained(make_plugin, kind, verify):
    """Return everything that a training leaves behind."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    model = Net()
    loader = loaders()[kind]
    optimizer = Remembering(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    steps = []
    booster = Booster(plugin=make_plugin())
    data = loader.dataset
    reads = getattr(data, "reads", None)
    watch = Watch(steps)
    register_hooks(watch)
    try:
        if verify:
            verify_objects(booster, model, optimizer, nn.CrossEntropyLoss(), loader)
        model, optimizer, criterion, loader, scheduler = booster.boost(
            model, optimizer, nn.CrossEntropyLoss(), loader, scheduler
        )
    finally:
        unregister_hooks(watch)
    assert getattr(data, "reads", None) == reads
    assert model.training
    assert not steps
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = criterion(model(x), y)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    adapter = booster.state_adapter(model)
    tensors = [shard.data.clone() for shard in (*adapter.model_shards(), *adapter.optimizer_shards())]
    randomness = torch.get_rng_state(), random.random(), np.random.rand()  # noqa: NPY002
    return losses, tensors, randomness, scheduler.get_last_lr()


def leaves_no_trace(make_plugin, kind):
    """Assert that a training after a verification is one without it, bit for bit."""
    plain, verified = (trained(make_plugin, kind, is_verified) for is_verified in (False, True))
    assert plain[0] == verified[0]
    assert len(plain[1]) == len(verified[1]) > 0
    for one, other in zip(plain[1], verified[1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain[2][0], verified[2][0])
    assert plain[2][1:] == verified[2][1:]
    assert plain[3] == verified[3]
