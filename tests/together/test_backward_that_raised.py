"""A backward that raises, and what comes after it: gradients add up as in one process, and no rank waits forever."""

import contextlib

import torch
import torch.distributed as dist
from matrix import matrix, named
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

CLOSE = tolerance_for(torch.float32)
PLUGINS = {
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, bucket_bytes=64),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, bucket_bytes=64),
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
}


class FailingError(RuntimeError):
    pass


class Net(nn.Module):
    """Three layers, of which backward may reach only the last ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.fails_before = None

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.fails_before == number:
                x.register_hook(self.fail)
        return x

    def fail(self, gradient):
        raise FailingError(gradient.shape)


def make_net():
    torch.manual_seed(2)
    return Net()


def loss_of(model, seed, rank, fails_before=None, net=None):
    (net or model).fails_before = fails_before
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + rank))).square().mean()


def expected(rounds, world_size, first=0):
    """Return the mean over ranks of what each one's backward passes accumulate in one process.

    Args:
        rounds: For each backward and each rank, the layer before which it raises, or ``None``.
        world_size: Number of ranks.
        first: The backward after which nothing is dropped.
    """
    total = {}
    for rank in range(world_size):
        net = make_net()
        for seed, fails in enumerate(rounds):
            if seed < first:
                continue
            with contextlib.suppress(FailingError):
                loss_of(net, seed, rank, fails[rank]).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad / world_size
    return total


def accumulated(plugin, rounds, direct, warm, drops):
    rank, net = dist.get_rank(), make_net()
    booster = Booster(plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0))
    if warm:
        booster.backward(loss_of(model, 50, rank, net=net), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    for seed, fails in enumerate(rounds):
        loss = loss_of(model, seed, rank, fails[rank], net)
        try:
            loss.backward() if direct else booster.backward(loss, optimizer)
        except FailingError:
            assert fails[rank] is not None
            if drops:
                optimizer.zero_grad()
        else:
            assert fails[rank] is None
    every = {name: full_gradient(booster, model, name) for name, _ in net.named_parameters()}
    return {name: gradient for name, gradient in every.items() if gradient is not None}


ROUNDS = {
    "on every rank": [(0, 0), (None, None)],
    "on one rank": [(0, None), (None, None)],
    "at another place on each rank": [(0, 1), (None, None), (1, 1), (None, None)],
    "at first and last": [(1, 1), (None, None), (0, 0)],
}


SAME_PLACE = ["on every rank", "at first and last"]
"""Gemini's ranks gather parameters together in backward, so that none goes on where another one has raised."""


def run_all(plugin, direct):
    """Return what each case accumulates, in the first rounds of a run and in later ones."""
    return {
        (case, warm): accumulated(plugin, ROUNDS[case], direct, warm, drops=False)
        for case in (SAME_PLACE if plugin == "gemini" else ROUNDS)
        for warm in (False, True)
    }


@matrix(
    ["gemini-booster.backward"],
    plugin=list(PLUGINS),
    direct=named([True, False], ["loss.backward", "booster.backward"]),
)
def test_gradients_after_a_backward_that_raised_equal_one_process(plugin, direct):
    for cases in run_on_ranks(run_all, 2, plugin, direct):
        for (case, warm), gradients in cases.items():
            found = {f"{case}, {warm}: {name}": gradient for name, gradient in gradients.items()}
            told = {f"{case}, {warm}: {name}": gradient for name, gradient in expected(ROUNDS[case], 2).items()}
            assert_same_tensors(found, told, CLOSE)
