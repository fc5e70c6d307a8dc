"""Effects of the FSDP plugin's options: when and over which ranks parameters are gathered, and what is replicated."""

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process
from torch import nn
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_runtime import collectives
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.models import TinyMLP

WIDTHS = (4, 8, 12, 16, 20, 24)
"""Divisible by two and four ranks."""


def make_layers():
    """Return layers of different sizes, so that the size of a gather identifies its layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(WIDTHS)))


def events_of_a_step(options):
    """Return gathers, forwards and reductions by layer in the order of a step, and the ranks of each gather."""
    booster = Booster("cpu", plugin=TorchFSDPPlugin(unit_classes=["Linear"], **options))
    net = make_layers()
    layer_of = {parameter.numel(): index for index, parameter in enumerate(net.parameters())}
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    events, sizes = [], []
    for index, layer in enumerate(net):
        layer.register_forward_hook(lambda *_, index=index: events.append(("forward", index)))
    originals = collectives.all_gather, collectives.reduce_scatter

    def gathering(tensor, bounds, group, **options):
        events.append(("gather", layer_of[tensor.numel()]))
        sizes.append(dist.get_world_size(group))
        return originals[0](tensor, bounds, group, **options)

    def reducing(tensor, *args, **kwargs):
        events.append(("reduce", layer_of[tensor.numel()]))
        return originals[1](tensor, *args, **kwargs)

    for _ in range(2):
        events.clear()
        sizes.clear()
        collectives.all_gather, collectives.reduce_scatter = gathering, reducing
        try:
            booster.backward(model(torch.ones(2, WIDTHS[0])).square().mean(), optimizer)
        finally:
            collectives.all_gather, collectives.reduce_scatter = originals
        optimizer.step()
        optimizer.zero_grad()
    return list(events), list(sizes)


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


def test_each_layer_is_gathered_twice_by_default():
    for events, sizes in run_on_ranks(events_of_a_step, 2, {}):
        gathered = [layer for kind, layer in events if kind == "gather"]
        assert sorted(gathered) == sorted([*range(5)] * 2)
        assert [layer for kind, layer in events if kind == "reduce"] == [4, 3, 2, 1, 0]
        assert set(sizes) == {2}
        assert ahead(events, "forward") == [1, 2, 3, 4, 5]


def test_layers_are_gathered_once_without_reshard_after_forward():
    for events, _ in run_on_ranks(events_of_a_step, 2, {"reshard_after_forward": False}):
        assert [layer for kind, layer in events if kind == "gather"] == [*range(5)]


def test_reshard_to_a_number_of_ranks_gathers_over_these_in_backward():
    for _, sizes in run_on_ranks(events_of_a_step, 4, {"reshard_after_forward": 2}):
        assert sizes[:5] == [4] * 5
        assert set(sizes[5:]) == {2}


def test_forward_prefetch():
    for events, _ in run_on_ranks(events_of_a_step, 2, {"forward_prefetch": 2}):
        assert ahead(events, "forward") == [3, 4, 5, 5, 5]


def test_backward_prefetch():
    plain = run_on_ranks(events_of_a_step, 2, {})[0][0]
    for events, _ in run_on_ranks(events_of_a_step, 2, {"backward_prefetch": 3}):
        further = [a - b for a, b in zip(ahead(events, "reduce"), ahead(plain, "reduce"), strict=True)]
        assert further[4] == 2, "torch gathers one layer ahead by itself"
        assert min(further) >= 0


# ---- replicated parameters and buffers


def rows(number, replica):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + replica))


def replicated(_booster, model, _optimizer):
    return sorted(n for n, p in model.unwrap().named_parameters() if not isinstance(p, DTensor))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, [], marks=pytest.mark.slow),
        pytest.param({"ignored_modules": ["second"]}, ["second.bias", "second.weight"], marks=pytest.mark.slow),
        ({"ignored_parameters": ["first.weight"]}, ["first.weight"]),
    ],
)
def test_ignored_parameters_are_replicated_and_averaged(options, expected):
    case = Case(build=TinyMLP, batch=rows)
    assert assert_equals_one_process(case, Setting(TorchFSDPPlugin, options), tell=replicated) == [expected] * 2


def running_means(options):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.backward(model(torch.randn(8, 4) + dist.get_rank()).square().mean(), optimizer)
    optimizer.step()
    return net[1].running_mean.clone()


@pytest.mark.parametrize("is_sent", [True, False])
def test_broadcast_buffers_broadcasts_running_statistics(is_sent):
    first, second = run_on_ranks(running_means, 2, {"broadcast_buffers": is_sent})
    assert torch.equal(first, second) == is_sent


# ---- parameters that are frozen temporarily


def frozen_unit():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


def over_all(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unfreeze(step, model, _optimizer):
    if step == 2:
        model[0].requires_grad_(True)


def test_units_in_low_precision_train_once_they_are_unfrozen():
    case = Case(
        build=frozen_unit,
        batch=rows,
        optimizer=over_all,
        before_step=unfreeze,
        steps=4,
        max_norm=None,
        tolerance=tolerance_for(torch.bfloat16),  # one process computes in fp32
    )
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_classes": ["Linear"]}, precision="bf16"))
