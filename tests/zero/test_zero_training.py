"""ZeRO against plain torch in one process, gradient by gradient, in the situations that go wrong elsewhere."""

import contextlib
import random
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, noise, train_boosted, train_plainly
from driven_runs import same_loop
from matrix import matrix, named
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_runtime import collectives, full_gradient
from booster_testing.compare import EXACT, assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

CLOSE = tolerance_for(torch.float32)


class Net(nn.Module):
    """Two matrices, tied across two uses, and vectors; which branch comes first is the caller's choice."""

    def __init__(self, *, reentrant=False, left_first=True):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 3)
        self.reentrant = reentrant
        self.left_first = left_first

    def forward(self, x):
        x = torch.tanh(self._inner(x[:, :6]))
        branches = [self.left, self.right] if self.left_first else [self.right, self.left]
        total = 0
        for branch in branches:
            total = total + torch.tanh(branch(x))
        return self.out(torch.tanh(self._inner(total)))

    def _inner(self, x):
        if self.reentrant:
            return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True)
        return self.inner(x)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


def over_all(name, model):
    return OPTIMIZERS[name](list(model.parameters()))


def rows(number, replica):
    """Return three, one or two rows of six inputs and three targets."""
    return torch.randn((3, 1, 2)[number % 3], 9, generator=torch.Generator().manual_seed(100 * number + replica))


def squares(outputs, batch):
    return (outputs - batch[:, 6:]).square().sum(1).mean()


def training(name="sgd", **changes):
    """Return a training of five steps of three micro-batches of other sizes."""
    settings = {"optimizer": partial(over_all, name), "steps": 5, "micro_batches": 3, "max_norm": 0.7}
    return Case(**{"build": Net, "batch": rows, "loss": squares, **settings, **changes})


def assert_parity(case, options, num_ranks=2, **more):
    return assert_equals_one_process(
        case, Setting(LowLevelZeroPlugin, {"bucket_bytes": 64, **options}, num_ranks), **more
    )


# others are in the conformance kit
@matrix(1, name=["adagrad", "rmsprop", "nadam"], stage=[1, 2])
def test_gradients_norm_and_parameters_equal_one_process(name, stage):
    assert_parity(training(name), {"stage": stage, "bucket_bytes": 300})


@matrix(1, options=named([{"stage": 2}, {"partition": "parameter"}], ["flat", "parameter"]), world_size=[3, 4])
def test_any_number_of_ranks_equals_one_process(world_size, options):
    assert_parity(training(), {**options, "bucket_bytes": 200}, world_size)


REPLICATED = {"stage": 2, "replica_size": 2, "bucket_bytes": 300}
RIGHT_FIRST = partial(Net, left_first=False)


@same_loop(training("adamw", build=RIGHT_FIRST), Setting(LowLevelZeroPlugin, REPLICATED, 4))
def test_a_step_averages_over_replicas_what_the_only_backward_did_not(run):
    for step in range(5):
        with run.no_sync():
            run.backward(run.loss(step))
        run.step(max_norm=0.7)


@on_ranks(2, timeout_seconds=120)
def test_delays_and_overlap_do_not_change_a_bit():
    """Train again and again while messages are started and awaited at random moments."""
    chance = random.Random(dist.get_rank())

    def late(call):
        def run(*args, **kwargs):
            time.sleep(chance.random() * 2e-3)
            return call(*args, **kwargs)

        return run

    def trained(**options):
        setting = Setting(LowLevelZeroPlugin, {"bucket_bytes": 64, **options})
        return train_boosted(training("adamw", steps=2), setting).trained

    undisturbed = {stage: trained(stage=stage) for stage in (1, 2)}
    calls = {name: late(getattr(collectives, name)) for name in ("reduce_scatter", "all_gather")}
    with mock.patch.multiple(collectives, **calls):
        for repetition in range(20):
            stage = 1 + repetition % 2
            overlap = {"overlap_communication": repetition % 3 > 0, "overlap_allgather": repetition % 4 > 1}
            again = trained(stage=stage, **overlap)
            assert again.norms == undisturbed[stage].norms
            assert_same_tensors(again.parameters, undisturbed[stage].parameters, EXACT)


# ---- graphs that differ between ranks and steps


def boost(options=None, precision=None, **changes):
    setting = Setting(LowLevelZeroPlugin, {"bucket_bytes": 64, **(options or {})}, precision=precision)
    booster = setting.make_booster()
    model, optimizer, *_ = booster.boost(*training(**changes).make())
    return booster, model, optimizer


def backward(booster, model, optimizer, step=0):
    x = rows(step, dist.get_rank())
    loss = squares(model(x), x)
    booster.backward(loss, optimizer)
    return loss


@on_ranks(2)
def test_buckets_follow_backward_after_the_first_step():
    booster, model, optimizer = boost({"bucket_bytes": 4 * 36})
    model.unwrap().left_first = False
    orders = []
    for _ in range(2):
        laid_out = [slot.index for bucket in optimizer.layout.buckets for slot in bucket.plan.slots]
        orders.append([optimizer.names[index] for index in laid_out if optimizer.names[index].endswith("weight")])
        backward(booster, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    registered = ["inner.weight", "left.weight", "right.weight", "out.weight"]
    reached = ["out.weight", "left.weight", "right.weight", "inner.weight"]
    num_buckets = len(optimizer.layout.buckets)
    assert orders == [registered[::-1], reached]
    assert num_buckets >= 4


def order_differs(_step, model, _optimizer):
    model.left_first = not dist.is_initialized() or dist.get_rank() == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_produce_gradients_in_another_order(stage):
    assert_parity(training(before_step=order_differs), {"stage": stage})


def test_a_gradient_that_comes_in_parts_is_complete():
    assert_parity(training(build=partial(Net, reentrant=True)), {})


@raises_on_ranks(GradientError, "was changed after it had been reduced over the ranks", 2)
def test_a_gradient_that_comes_in_parts_unexpectedly_raises():
    booster, model, optimizer = boost()
    for _ in range(2):
        backward(booster, model, optimizer)
        model.unwrap().reentrant = True


@on_ranks(2)
def test_a_group_of_strangers_or_of_what_is_held_is_refused():
    _, model, optimizer = boost()
    with pytest.raises(ConfigError, match="is not one of the boosted model's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ConfigError, match=r"'left\.weight' is in a parameter group already"):
        optimizer.add_param_group({"params": [model.unwrap().left.weight]})


class Optional(nn.Module):
    """Uses a layer where it is told to, and another one never."""

    def __init__(self):
        super().__init__()
        self.used, self.optional, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, use_optional):
        x = self.used(x)
        return self.optional(x) if use_optional else x


@pytest.mark.parametrize("options", [{}, {"stage": 2, "bucket_bytes": 1}], ids=["stage 1", "stage 2"])
@same_loop(Case(build=Optional, batch=noise(5, 4)), lambda options: Setting(LowLevelZeroPlugin, options, 1))
def test_gradients_of_one_rank_are_added_as_they_come(run):
    for step in range(3):
        run.backward(run.loss(5 * step, use_optional=step != 1))
        run.optimizer.zero_grad(set_to_none=False)
        for micro in range(1, 5):
            with run.no_sync() if micro % 2 else contextlib.nullcontext():
                run.backward(run.loss(5 * step + micro, use_optional=step != 1 and micro in (1, 4)))
        run.step(max_norm=0.5)


@on_ranks(1)
def test_narrow_gradients_of_one_rank_add_up_in_the_format_of_the_masters():
    booster = Setting(LowLevelZeroPlugin, precision="bf16").make_booster()
    net = nn.Linear(1, 1, bias=False)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with booster.no_sync(model):
        booster.backward(256 * model(torch.ones(1, 1)).sum(), optimizer)
    booster.backward(model(torch.ones(1, 1)).sum(), optimizer)
    assert full_gradient(booster, model, "weight").item() == 257.0  # which bf16 has not


@on_ranks(2)
def test_unused_parameters_can_be_forbidden():
    booster = Booster(plugin=LowLevelZeroPlugin(unused="raise"))
    net = Optional()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.backward(model(torch.ones(5, 4), dist.get_rank() == 1).sum(), optimizer)
    with pytest.raises(GradientError, match="took no part in backward") as caught:
        optimizer.step()
    unused = "rank 0: 'optional.weight', 'optional.bias', 'never.weight', 'never.bias'; rank 1: 'never.weight'"
    assert unused in str(caught.value)


# ---- the manners of torch


@pytest.mark.parametrize("closure", [False, True])
@on_ranks(2)
def test_the_plugin_clips_each_step_where_told_to(closure):
    case = training(steps=2, micro_batches=1, max_norm=0.25)
    booster, model, optimizer = boost({"max_norm": 0.25})
    for step in range(2):

        def evaluate(step=step):
            optimizer.zero_grad()
            return backward(booster, model, optimizer, step)

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    assert_same_tensors(model.state_dict(), train_plainly(case, dist.get_world_size()).parameters, CLOSE)


@on_ranks(2)
def test_gradients_may_travel_in_bf16():
    booster, model, optimizer = boost({"communication_dtype": "bf16"})
    backward(booster, model, optimizer)
    found = {name: full_gradient(booster, model, name) for name, _ in model.unwrap().named_parameters()}
    expected = train_plainly(training(steps=1, micro_batches=1), dist.get_world_size()).gradients[0]
    assert_same_tensors(found, expected, tolerance_for(torch.bfloat16))
    assert any(not torch.equal(gradient, expected[name]) for name, gradient in found.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_every_write_between_steps_is_kept(precision):
    """Write parameters through ``.data``, which raises no version, between steps of size zero."""
    booster, model, optimizer = boost(
        {}, precision, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0)
    )
    parameters = [*model.unwrap().parameters()]
    expected = [parameter.detach().clone() for parameter in parameters]
    for step in range(4):
        backward(booster, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        for values in [*expected, *(parameter.data for parameter in parameters)]:
            values.mul_(0.75).view(-1)[step % 3] = step
    backward(booster, model, optimizer, 4)
    optimizer.step()
    assert all(map(torch.equal, parameters, expected))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
@on_ranks(2)
def test_state_made_before_boost_moves_to_the_layout_of_the_first_step(kind):
    def stepped_before(model):
        optimizer = kind(list(model.named_parameters()), lr=0.01)
        model(rows(0, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def has_all_names(_booster, _model, optimizer):
        (held,) = optimizer.param_groups
        return len(held["param_names"]) == len(held["params"])

    assert all(assert_parity(training(optimizer=stepped_before, steps=3, micro_batches=1), {}, tell=has_all_names))
