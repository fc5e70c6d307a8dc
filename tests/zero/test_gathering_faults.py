"""What parameters in chunks can't bear is refused by name on every rank: changes by hand, copies, ranks that differ."""

import copy

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, noise, train_boosted
from gathering_plugin import GatheringPlugin
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.testing import assert_close

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import expect_on_ranks
from booster_testing.training import whole_model

WIDTH = 16


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def boost(model, **options):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    booster = Booster(plugin=GatheringPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(trained, lr=0.1))
    return booster, model, optimizer


def step(booster, model, optimizer, number=0):
    loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


# ---- parameters changed by hand


def give_other_memory(module):
    module.weight.data = torch.zeros_like(module.weight.data)


def change_in_place(module):
    with torch.no_grad():
        module.weight.mul_(2)


CHANGES = {
    "was given other memory": give_other_memory,
    "was changed in place": change_in_place,
}


@matrix(1, how=CHANGES, late=[False, True])
@on_ranks(2)
def test_a_parameter_changed_while_it_is_used_is_named(how, late):
    run = boost(layers())
    for number in range(8 if late else 1):
        step(*run, number)
    module = run[1].unwrap()[2]
    module.register_forward_hook(lambda *_: CHANGES[how](module))
    with pytest.raises(ConfigError, match=f"'2.weight' {how}"):
        step(*run)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(1)
def test_one_rank_keeps_what_forward_writes_through_data(precision):
    def write(module, *_):
        module.weight.data.clamp_(-0.02, 0.02)
        module.weight.data[0, 0] = 0.5

    written = []
    for booster in (Booster("cpu"), Booster("cpu", precision, GatheringPlugin())):
        model = layers()
        model[2].register_forward_hook(write)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(3):
            step(booster, model, optimizer, number)
        written.append(whole_model(booster, model)["2.weight"].float())
    assert_close(*written, rtol=0, atol=1e-7 if precision == "fp32" else 4e-3)


WRITES = {**CHANGES, "was changed through `.data`": lambda module: module.weight.data.mul_(2)}


@pytest.mark.parametrize("how", WRITES)
@on_ranks(2)
def test_a_write_into_parameters_that_are_only_to_be_read_is_told_on_all_ranks(how):
    _, model, _ = boost(layers())
    is_told = pytest.raises(ConfigError, match=rf"rank 0: '2.weight' {how}.*whole_parameters\(writes=True\)")
    with is_told, model.whole_parameters():
        if dist.get_rank() == 0:
            WRITES[how](model.unwrap()[2])


@on_ranks(2)
def test_a_frozen_parameter_may_have_other_memory_with_its_values():
    class OwnCopy(nn.Linear):
        """Gives its weight other memory in each forward, as bitsandbytes' 8-bit layers do."""

        def __init__(self, *, is_kept):
            super().__init__(WIDTH, WIDTH, bias=False)
            self.requires_grad_(requires_grad=False)
            self.own, self.is_kept = self.weight.detach().clone(), is_kept

        def forward(self, x):
            out = super().forward(x)
            self.weight.data = self.own if self.is_kept else 2 * self.own
            return out

    def case_of(*, is_kept):
        def build():
            model = layers()
            model[2] = OwnCopy(is_kept=is_kept)
            return model

        return Case(build=build, batch=noise(4, WIDTH))

    assert_equals_one_process(case_of(is_kept=True), Setting(GatheringPlugin))
    with pytest.raises(ConfigError, match=r"'2\.weight' was given other memory"):
        train_boosted(case_of(is_kept=False), Setting(GatheringPlugin))


# ---- what hooks can't serve


@on_ranks(2)
def test_a_copy_of_whole_parameters_is_a_plain_model():
    _, model, _ = boost(layers())
    with model.whole_parameters():
        copied = copy.deepcopy(model.unwrap())
    assert torch.equal(copied(torch.ones(1, WIDTH)), layers()(torch.ones(1, WIDTH)))


# ---- ranks that differ


class Chosen(nn.Module):
    """Runs the experts that the data names, of several sizes, between layers that every rank uses."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH * (1 + number % 2)) for number in range(4))
        self.exit = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, numbers):
        x = self.entry(x)
        for number in numbers:
            x = x + self.experts[number](x)[..., :WIDTH]
        return self.exit(x)


def use_another_module_later(of_ranks, replica_size, *, as_on_devices=True):
    """Let ranks part, with experts of one size."""
    booster, model, optimizer = boost(Chosen(), max_prefetch=0, replica_size=replica_size)
    model.gatherer.order._compares_first = not as_on_devices
    for number in range(3):
        expert = of_ranks[dist.get_rank()] if number == 2 else 0
        booster.backward(model(torch.ones(1, WIDTH), [expert]).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("of_ranks", "replica_size"), [([0, 2], 1), ([0, 0, 2, 0], 2)], ids=["all share", "two replicas"]
)
def test_ranks_that_part_later_are_told_of_the_first_difference_before_they_step(of_ranks, replica_size):
    first = r"was that of 'experts\.0\.\w+' on rank \d, that of 'experts\.2\.\w+' on rank 1\."
    if replica_size > 1:
        first = r"was that of 'experts\.2\.\w+' on rank 2, that of 'experts\.0\.\w+' on rank 3\."
    match = rf"or have gathered, different ones.*Gather \d+ since the last step {first} .*or pass `leaf_class`"
    expect_on_ranks(ConfigError, match, use_another_module_later, len(of_ranks), of_ranks, replica_size)


def test_ranks_on_cpus_are_told_before_they_gather_what_has_other_sizes():
    match = r"Now rank 0 that of 'experts\.0\.\w+', rank 1 that of 'experts\.1\.\w+'\. .*or pass `leaf_class`"
    expect_on_ranks(ConfigError, match, use_another_module_later, 2, [0, 1], 1, as_on_devices=False)


@pytest.mark.parametrize("as_on_devices", [True, False])
@on_ranks(4)
def test_replicas_may_use_other_modules_than_each_other(as_on_devices):
    use_another_module_later([0, 0, 2, 2], 2, as_on_devices=as_on_devices)
