"""The checkpoint engine, called as `Booster` is, with an adapter in place of a boosted model."""

import contextlib
import errno
import itertools
import os
from unittest import mock

import torch
from torch import nn

from booster_checkpoint import CheckpointEngine, session
from booster_checkpoint.save.targets import target_at
from booster_core import Booster
from booster_core.checkpoint_io import LoadRequest, ModelState, SaveRequest
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.ranks.store import Host
from booster_core.state import ReplicatedStateAdapter


def on_hosts(hosts):
    """Return a patch that tells each rank the number of its host; ranks share all folders none the less."""
    return mock.patch.object(session, "this_host", return_value=Host(f"host-{hosts[DistCoordinator().rank]}"))


@contextlib.contextmanager
def on_hosts_with_disks_of_their_own(hosts):
    """Tell each rank the number of its host, and hide from other hosts what rank 0 writes for them to find."""
    real, is_elsewhere = os.open, hosts[DistCoordinator().rank] != hosts[0]

    def open_(path, *args, **kwargs):
        if is_elsewhere and str(path).endswith(".probe"):
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        return real(path, *args, **kwargs)

    with on_hosts(hosts), mock.patch.object(session.os, "open", open_):
        yield


class EngineCalls:
    """An engine of all ranks that were launched.

    Args:
        timeout_seconds: How long a call waits for missing ranks; the launch's limit by default.
        **options: As for `CheckpointEngine`.
    """

    def __init__(self, *, timeout_seconds=None, **options):
        booster = Booster("cpu")
        context = booster.context
        self.engine = CheckpointEngine(booster.plugin, context, **options)
        if timeout_seconds is not None:
            self.engine._session._timeout_seconds = timeout_seconds
        self.saver = self.engine._saver
        self.rank = context.coordinator.rank
        self.wait, self.close = self.engine.wait, self.engine.close

    def write_folder(self, name, folder, parts, **options):
        return self.saver.save(parts, target_at(folder), name, **options)

    def save_model(self, adapter, path, *, module=None, dtype=None, **options):
        state = ModelState(adapter=adapter, module=module, dtype=dtype)
        self.engine.save_model(state, SaveRequest(call="save_model", path=path, **options))

    def load_model(self, adapter, path, *, module=None, **options):
        state = ModelState(adapter=adapter, module=module)
        return self.engine.load_model(state, LoadRequest(call="load_model", path=path, **options))

    def save_optimizer(self, adapter, path, **options):
        self.engine.save_optimizer(adapter, SaveRequest(call="save_optimizer", path=path, **options))

    def load_optimizer(self, adapter, path, **options):
        self.engine.load_optimizer(adapter, LoadRequest(call="load_optimizer", path=path, **options))

    def save_lr_scheduler(self, scheduler, path):
        self.engine.save_lr_scheduler(scheduler, SaveRequest(call="save_lr_scheduler", path=path))

    def load_lr_scheduler(self, scheduler, path):
        self.engine.load_lr_scheduler(scheduler, LoadRequest(call="load_lr_scheduler", path=path))


def trained_parts(*widths, seed=0, **options):
    """Return an engine, an adapter over a stack of linear layers and its AdamW after a step, and the model.

    Args:
        *widths: Of the model's input and of each layer.
        seed: Of its values, with which its learning rate grows.
        **options: As for `EngineCalls`.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(*sizes) for sizes in itertools.pairwise(widths)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + seed))
    model(torch.ones(2, widths[0])).sum().backward()
    optimizer.step()
    return EngineCalls(**options), ReplicatedStateAdapter(model, optimizer, DistCoordinator()), model


def save_module(model, path, **options):
    """Save a model that all ranks have alike."""
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    EngineCalls().save_model(adapter, path, module=model, **options)


def load_module(model, path, **options):
    """Load a model that all ranks have alike, and return what was loaded."""
    adapter = ReplicatedStateAdapter(model, None, DistCoordinator())
    return EngineCalls().load_model(adapter, path, module=model, **options)
