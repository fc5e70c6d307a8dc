"""Effects of the FSDP plugin's options: when and over which ranks parameters are gathered, and what is replicated."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, noise
from driven_runs import same_loop
from matrix import matrix, named
from ranked import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import collectives
from booster_testing.models import TinyMLP

WIDTHS = (4, 8, 12, 16, 20, 24)
"""Divisible by two and four ranks."""


def events_of_a_step(**options):
    """Return gathers, forwards and reductions by layer in the order of a step, and the ranks of each gather."""
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Linear"], **options))
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(WIDTHS)))
    # The size of a gather identifies its layer.
    layer_of = {parameter.numel(): index for index, parameter in enumerate(net.parameters())}
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    events, sizes = [], []
    for index, layer in enumerate(net):
        layer.register_forward_hook(lambda *_, index=index: events.append(("forward", index)))
    gather, reduce = collectives.all_gather, collectives.reduce_scatter

    def gathering(tensor, bounds, group, **options):
        events.append(("gather", layer_of[tensor.numel()]))
        sizes.append(dist.get_world_size(group))
        return gather(tensor, bounds, group, **options)

    def reducing(tensor, *args, **kwargs):
        events.append(("reduce", layer_of[tensor.numel()]))
        return reduce(tensor, *args, **kwargs)

    for _ in range(2):
        events.clear()
        sizes.clear()
        with mock.patch.multiple(collectives, all_gather=gathering, reduce_scatter=reducing):
            booster.backward(model(torch.ones(2, WIDTHS[0])).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return events, sizes


def ahead(events, what):
    """Return, for each layer, how many layers had been gathered in this pass at the time of its event."""
    passes = {
        "forward": events[: events.index(("forward", 4)) + 1],
        "reduce": events[events.index(("forward", 4)) + 1 :],
    }
    found = {}
    for position, (kind, layer) in enumerate(passes[what]):
        if kind == what:
            found[layer] = sum(1 for other, _ in passes[what][:position] if other == "gather")
    return [found[layer] for layer in range(5)]


@on_ranks(2)
def test_each_layer_is_gathered_twice_by_default():
    events, sizes = events_of_a_step()
    gathered = [layer for kind, layer in events if kind == "gather"]
    assert sorted(gathered) == sorted([*range(5)] * 2)
    assert [layer for kind, layer in events if kind == "reduce"] == [4, 3, 2, 1, 0]
    assert set(sizes) == {2}
    assert ahead(events, "forward") == [1, 2, 3, 4, 5]


@on_ranks(2)
def test_layers_are_gathered_once_without_reshard_after_forward():
    events, _ = events_of_a_step(reshard_after_forward=False)
    assert [layer for kind, layer in events if kind == "gather"] == [*range(5)]


@on_ranks(4)
def test_reshard_to_a_number_of_ranks_gathers_over_these_in_backward():
    _, sizes = events_of_a_step(reshard_after_forward=2)
    assert sizes[:5] == [4] * 5
    assert set(sizes[5:]) == {2}


@on_ranks(2)
def test_forward_prefetch():
    events, _ = events_of_a_step(forward_prefetch=2)
    assert ahead(events, "forward") == [3, 4, 5, 5, 5]


@on_ranks(2)
def test_backward_prefetch():
    (plain, _), (events, _) = events_of_a_step(), events_of_a_step(backward_prefetch=3)
    further = [a - b for a, b in zip(ahead(events, "reduce"), ahead(plain, "reduce"), strict=True)]
    assert further[4] == 2, "torch gathers one layer ahead by itself"
    assert min(further) >= 0


# ---- replicated parameters and buffers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, [], marks=pytest.mark.slow),
        pytest.param({"ignored_modules": ["second"]}, ["second.bias", "second.weight"], marks=pytest.mark.slow),
        ({"ignored_parameters": ["first.weight"]}, ["first.weight"]),
    ],
)
@on_ranks(2)
def test_ignored_parameters_are_replicated_and_averaged(options, expected):
    def replicated(_booster, model, _optimizer):
        return sorted(name for name, each in model.unwrap().named_parameters() if not isinstance(each, DTensor))

    case = Case(build=TinyMLP, batch=noise(4, 8))
    assert assert_equals_one_process(case, Setting(TorchFSDPPlugin, options), tell=replicated) == [expected] * 2


@pytest.mark.parametrize("is_sent", [True, False])
@on_ranks(2)
def test_broadcast_buffers_broadcasts_running_statistics(is_sent):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(broadcast_buffers=is_sent))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.backward(model(torch.randn(8, 4) + dist.get_rank()).square().mean(), optimizer)
    optimizer.step()
    means = [torch.empty(4), torch.empty(4)]
    dist.all_gather(means, net[1].running_mean)
    assert torch.equal(*means) == is_sent


# ---- layers that are gathered ahead and left out


class Skipping(nn.Module):
    """Layers, some of which a call may leave out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, skipped=()):
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = torch.tanh(layer(x))
        return x


@matrix(
    1,
    2,
    skipped=named([(1,), (1, 2), (3,)], str),
    options=named([{}, {"forward_prefetch": 2}], ["default", "two ahead"]),
    evaluates=named([True, False], ["without gradients", "without backward"]),
)
@same_loop(
    Case(build=Skipping, batch=noise(2, 6)),
    lambda options: Setting(TorchFSDPPlugin, {"unit_classes": ["Linear"], **options}),
)
def test_layers_that_were_gathered_ahead_and_left_out_have_the_values_of_the_next_step(run, evaluates, skipped):
    for step in range(4):
        run.backward(run.loss(step))
        with torch.set_grad_enabled(not evaluates):
            run.loss(step, skipped=skipped)
        run.step()
