"""Replica groups for tests that kill nobody: the reused workers of `run_on_ranks`, launched as groups of their own."""

import functools
import inspect
import time

import torch
from free_ports import free_port
from torch import nn

from booster_core import Booster, launch, shutdown
from booster_core.ranks import DistCoordinator, close_world
from booster_testing.ranks import run_on_ranks

BATCH = 4


def run_groups(fn, num_groups, ranks=1, *args, min_replicas=None, **kwargs):
    """Call ``fn(group, *args)`` in replica groups, and return the results, those of the first group first.

    Args:
        fn: A function at a module's top level; ``group`` is a `Group`.
        num_groups: Number of groups.
        ranks: In each group.
        *args: Further arguments.
        min_replicas: Of the lighthouse; all groups by default, so that none goes on alone on a slow machine.
        **kwargs: Those of `run_on_ranks`.
    """
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=min_replicas or num_groups, join_timeout_ms=10_000)
    try:
        ports = [free_port() for _ in range(num_groups)]
        settings = {"timeout_seconds": 120.0, **kwargs}
        return run_on_ranks(_in_group, num_groups * ranks, fn, num_groups, ports, server.address(), args, **settings)
    finally:
        server.shutdown()


def on_groups(num_groups, ranks=1, **options):
    """Let replica groups call the test, with a `Group` and pytest's parameters.

    Args:
        num_groups: Number of groups.
        ranks: In each group, or the parameter of the test that has their number.
        options: Those of `run_groups`.
    """

    def decorate(function):
        _, *names = inspect.signature(function).parameters

        @functools.wraps(function)
        def test(*values, **parameters):
            if values:  # on a rank, which found the test under its name
                function(*values)
            else:
                size = parameters[ranks] if isinstance(ranks, str) else ranks
                run_groups(test, num_groups, size, *(parameters[name] for name in names), **options)

        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return test

    return decorate


def _in_group(fn, num_groups, ports, lighthouse, args):
    coordinator = DistCoordinator()
    ranks = coordinator.world_size // num_groups
    replica_id, rank = divmod(coordinator.rank, ranks)
    close_world()
    launch(rank=rank, world_size=ranks, host="127.0.0.1", port=ports[replica_id], verbose=False, timeout_seconds=30)
    try:
        return fn(Group(replica_id, num_groups, rank, ranks, lighthouse), *args)
    finally:
        shutdown()


class Group:
    """One rank of a replica group.

    Attributes:
        replica_id: The group's number.
        rank: In the group.
    """

    def __init__(self, replica_id, num_groups, rank, ranks, lighthouse):
        self.replica_id, self.num_groups, self.rank, self.ranks = replica_id, num_groups, rank, ranks
        self.place = {"replica_id": replica_id, "num_replicas": num_groups, "lighthouse": lighthouse}

    @property
    def index(self):
        """Of this rank among all of all groups."""
        return self.replica_id * self.ranks + self.rank

    def booster(self, *, precision=None, **options):
        """Return a Booster with the plugin of this group."""
        from booster_ft import FaultTolerantPlugin

        return Booster(
            plugin=FaultTolerantPlugin(**self.place, timeout_seconds=20, **options), mixed_precision=precision
        )

    def meet(self, booster, folder):
        """Wait until all groups are known to the lighthouse, so that they take their first step together."""
        booster.plugin.groups.join()
        say(folder, f"met-{self.index}")
        for other in range(self.num_groups * self.ranks):
            hear(folder, f"met-{other}")

    def gather(self, folder, value):
        """Return the values of all ranks of all groups; called once in a test."""
        torch.save(value, folder / f"value-{self.index}")
        say(folder, f"gave-{self.index}")
        everyone = range(self.num_groups * self.ranks)
        for other in everyone:
            hear(folder, f"gave-{other}")
        return [torch.load(folder / f"value-{other}", weights_only=False) for other in everyone]


def say(folder, what):
    """Let `hear` return in other groups."""
    (folder / what).touch()


def hear(folder, what, seconds=60.0):
    """Wait until another group has said something."""
    end = time.time() + seconds
    while not (folder / what).exists():
        assert time.time() < end, what
        time.sleep(0.01)


class Net(nn.Module):
    """Layers of which one may be left out."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 16, dtype=dtype)
        self.norm, self.last = nn.LayerNorm(16, dtype=dtype), nn.Linear(16, 1, dtype=dtype)
        self.skips = False

    def forward(self, x):
        """Return one number for each sample."""
        x = torch.tanh(self.first(x))
        return self.last(self.norm(x if self.skips else torch.tanh(self.second(x))))


def batch_of(number, dtype=torch.float64):
    """Return the samples of a batch that has a number."""
    return torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def loss_of(model, x):
    """Return the mean loss of a batch."""
    return (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()


def state_of(booster, model):
    """Return copies of all that this rank holds of model and optimizer."""
    adapter = booster.state_adapter(model)
    shards = [*adapter.model_shards(), *adapter.optimizer_shards()]
    return {f"{shard.key}:{shard.flat}": shard.data.detach().clone() for shard in shards}


def assert_same_bits(ours, theirs):
    """Assert that two states are equal bit for bit."""
    assert ours.keys() == theirs.keys()
    for key, values in ours.items():
        assert (
            torch.equal(values.view(torch.uint8), theirs[key].view(torch.uint8))
            if values.dim()
            else values == theirs[key]
        ), key
