"""A tiny training with dropout, momentum, a schedule and shuffled samples, for tests that kill and resume runs."""

import multiprocessing
import random

import numpy as np
import torch
from reference_plugins import ReferencePlugin
from torch import Tensor, nn
from torch.utils.data import Dataset

from booster_core import Booster
from booster_core.ranks import DistCoordinator


class NumberedSamples(Dataset[tuple[int, Tensor]]):
    """Samples that contain their index; shape ``(8,)``.

    Args:
        size: Number of samples.
    """

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, torch.full((8,), index / 10.0)


class NoisyModel(nn.Module):
    """Draws from Python's, NumPy's and torch's generators in each forward; input of shape ``(N, 8)``.

    Args:
        width: Size of the hidden layer.
    """

    def __init__(self, width=32):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(width, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        """Return the output of shape ``(N, 4)``."""
        self.seen += len(x)
        noise = random.random() / 9 + np.random.rand() / 9  # noqa: NPY002 - the global generators are meant
        return self.second(self.drop(torch.tanh(self.first(x)))) * (1 + noise)


class ResumableRun:
    """Model, optimizer, scheduler and data of a run, constructed as in a script.

    Args:
        samples: Size of the data set.
        batch: Samples per rank and step.
        precision: As for ``Booster(mixed_precision=...)``.
        workers: Data loader processes.
        drop_last: Drop the last incomplete batch of an epoch.
        seed: Seed of the random generators, different on each rank. The model and the order of samples don't depend on
            it.
        width: Size of the model.
        plugin: Plugin for runs with several ranks; `ReferencePlugin` by default.
    """

    def __init__(
        self, *, samples=48, batch=2, precision=None, workers=0, drop_last=False, seed=0, width=32, plugin=None
    ):
        world = DistCoordinator()
        torch.manual_seed(100 * seed + world.rank)
        random.seed(100 * seed + world.rank)
        np.random.seed(100 * seed + world.rank)  # noqa: NPY002 - the global generator is meant
        # What needs no other distribution, so that the tests of the toolkit run without strategies.
        several = ReferencePlugin() if plugin is None else plugin
        self.booster = Booster("cpu", precision, several if world.world_size > 1 else None)
        multiprocessing.set_forkserver_preload([__name__])  # else each worker process imports torch
        loader = self.booster.prepare_dataloader(
            NumberedSamples(samples),
            batch,
            shuffle=True,
            seed=5,
            num_workers=workers,
            drop_last=drop_last,
            # A fork of a process with gloo threads may inherit a lock that is never released.
            multiprocessing_context="forkserver" if workers else None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            module = NoisyModel(width)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        self.model, self.optimizer, _, self.loader, self.scheduler = self.booster.boost(
            module, optimizer, None, loader, scheduler
        )
        self.step = 0
        self.seen = []

    def objects(self):
        """Return the arguments of `Booster.save_checkpoint` and `Booster.load_checkpoint`."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
        }

    def save(self, root, **options):
        """Save the training state of the current step.

        Collective: every rank of the world.
        """
        self.booster.save_checkpoint(root, step=self.step, **self.objects(), **options)

    def load(self, root, **options):
        """Load a training state and continue from its step.

        Collective: every rank of the world.
        """
        loaded = self.booster.load_checkpoint(root, **self.objects(), **options)
        self.step = loaded.step
        return loaded

    def train(self, until):
        """Train to a step, over as many epochs as needed, and return the losses; ``seen`` lists the samples.

        Collective: every rank of the world.
        """
        losses = []
        while self.step < until:
            for indices, batch in self.loader:
                self.seen += indices.tolist()
                loss = self.model(batch).square().mean()
                self.booster.backward(loss, self.optimizer)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.step += 1
                losses.append(loss.item())
                if self.step == until:
                    break
        return losses

    def tensors(self):
        """Return copies of the model's and the optimizer's tensors as this rank holds them."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            state |= {f"{index}/{name}": torch.as_tensor(value).clone() for name, value in values.items()}
        return state
