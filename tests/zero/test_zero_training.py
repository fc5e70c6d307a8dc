"""ZeRO against plain torch in one process, gradient by gradient, in the situations that go wrong elsewhere."""

import contextlib
import random
import time

import pytest
import torch
import torch.distributed as dist
from matrix import matrix, named
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_runtime import collectives, full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

CLOSE = tolerance_for(torch.float32)


class Net(nn.Module):
    """Two matrices, tied across two uses, and vectors; which branch comes first is the caller's choice."""

    def __init__(self, *, reentrant=False):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.out = nn.Linear(6, 3)
        self.reentrant = reentrant
        self.left_first = True

    def forward(self, x):
        x = torch.tanh(self._inner(x))
        branches = [self.left, self.right] if self.left_first else [self.right, self.left]
        total = 0
        for branch in branches:
            total = total + torch.tanh(branch(x))
        return self.out(torch.tanh(self._inner(total)))

    def _inner(self, x):
        if self.reentrant:
            return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True)
        return self.inner(x)


def make_net(**options):
    torch.manual_seed(3)
    return Net(**options)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
}
MICROS = (3, 1, 2)


def data(step, micro, world_size, micros=MICROS):
    generator = torch.Generator().manual_seed(100 * step + micro)
    samples = micros[micro] * world_size
    return torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator)


def loss_of(model, x, y, samples):
    return (model(x) - y).square().sum() / samples


def plainly(optimizer_name, world_size, steps=5, micros=MICROS, left_first=True):
    model = make_net()
    model.left_first = left_first
    optimizer = OPTIMIZERS[optimizer_name](list(model.parameters()))
    gradients, norms = [], []
    for step in range(steps):
        for micro in range(len(micros)):
            loss_of(model, *data(step, micro, world_size, micros), sum(micros) * world_size).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        held = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(nn.utils.clip_grad_norm_(held, 0.7)))
        optimizer.step()
        model.zero_grad()
    return gradients, norms, {n: p.detach() for n, p in model.named_parameters()}


def boosted(optimizer_name, options, steps=5, micros=MICROS, num_synced=1, left_first=True):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    booster = Booster(plugin=LowLevelZeroPlugin(**options))
    model = make_net()
    model.left_first = left_first
    names = [n for n, _ in model.named_parameters()]
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[optimizer_name](list(model.parameters())))
    gradients, norms = [], []
    for step in range(steps):
        for micro in range(len(micros)):
            x, y = data(step, micro, world_size, micros)
            with booster.no_sync(model) if micro < len(micros) - num_synced else contextlib.nullcontext():
                loss = loss_of(model, x[rank::world_size], y[rank::world_size], sum(micros))
                booster.backward(loss, optimizer)
        gradients.append({n: full_gradient(booster, model, n) for n in names})
        norms.append(float(optimizer.clip_grad_by_norm(0.7)))
        optimizer.step()
        optimizer.zero_grad()
    return gradients, norms, {n: p.detach().clone() for n, p in model.unwrap().named_parameters()}


# others are in the conformance kit
@matrix(1, name=["adagrad", "rmsprop", "nadam"], stage=[1, 2])
def test_gradients_norm_and_parameters_equal_one_process(name, stage):
    gradients, norms, parameters = plainly(name, 2)
    for actual in run_on_ranks(boosted, 2, name, {"stage": stage, "bucket_bytes": 300}):
        assert_same_run(actual, (gradients, norms, parameters), name)


def assert_same_run(actual, expected, name):
    """Compare the gradients, norms and parameters of all steps."""
    held = {n for n, p in make_net().named_parameters() if name != "muon" or p.dim() == 2}  # others are never zeroed
    for ours, theirs in zip(actual[0], expected[0], strict=True):
        assert_same_tensors({n: ours[n] for n in held}, {n: theirs[n] for n in held}, CLOSE)
    assert_same_tensors(actual[0][0], expected[0][0], CLOSE)
    assert actual[1] == pytest.approx(expected[1], rel=CLOSE.relative)
    assert_same_tensors(actual[2], expected[2], CLOSE)


@matrix(1, options=named([{"stage": 2}, {"partition": "parameter"}], ["flat", "parameter"]), world_size=[3, 4])
def test_any_number_of_ranks_equals_one_process(world_size, options):
    expected = plainly("sgd", world_size)
    for actual in run_on_ranks(boosted, world_size, "sgd", {**options, "bucket_bytes": 200}):
        assert_same_run(actual, expected, "sgd")


@pytest.mark.parametrize(("micros", "num_synced"), [(MICROS, 1), ((2,), 0)], ids=["the last synced", "none synced"])
def test_replicas_equal_one_process(micros, num_synced):
    """Also where the step has to average what the only backward did not, after which everything is laid out again."""
    options = {"stage": 2, "replica_size": 2, "bucket_bytes": 300}
    expected = plainly("adamw", 4, micros=micros, left_first=False)
    for actual in run_on_ranks(boosted, 4, "adamw", options, micros=micros, num_synced=num_synced, left_first=False):
        assert_same_run(actual, expected, "adamw")


def repeated_with_delays():
    """Train again and again while messages are started and awaited at random moments."""
    chance = random.Random(dist.get_rank())
    original = collectives.reduce_scatter, collectives.all_gather

    def late(call):
        def run(*args, **kwargs):
            time.sleep(chance.random() * 2e-3)
            return call(*args, **kwargs)

        return run

    undisturbed = {stage: boosted("adamw", {"stage": stage, "bucket_bytes": 64}, steps=2) for stage in (1, 2)}
    collectives.reduce_scatter, collectives.all_gather = map(late, original)
    try:
        for repetition in range(20):
            stage = 1 + repetition % 2
            options = {"stage": stage, "bucket_bytes": 64, "overlap_communication": repetition % 3 > 0}
            options["overlap_allgather"] = repetition % 4 > 1
            _, norms, parameters = boosted("adamw", options, steps=2)
            assert norms == undisturbed[stage][1]
            assert all(torch.equal(parameters[name], tensor) for name, tensor in undisturbed[stage][2].items())
    finally:
        collectives.reduce_scatter, collectives.all_gather = original


def test_delays_and_overlap_do_not_change_a_bit():
    run_on_ranks(repeated_with_delays, 2, timeout_seconds=120)


# ---- graphs that differ between ranks and steps


def boost(options=None, optimizer="sgd", **net):
    booster = Booster(plugin=LowLevelZeroPlugin(**{"bucket_bytes": 64, **(options or {})}))
    model = make_net(**net)
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[optimizer](list(model.parameters())))
    return booster, model, optimizer


def layout_over_steps():
    """Return the order in which matrices are laid out in the buckets, before and after the first step."""
    booster, model, optimizer = boost({"bucket_bytes": 4 * 36})
    model.unwrap().left_first = False
    orders = []
    for _ in range(2):
        laid_out = [slot.index for bucket in optimizer.layout.buckets for slot in bucket.plan.slots]
        orders.append([optimizer.names[index] for index in laid_out if optimizer.names[index].endswith("weight")])
        booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return orders, len(optimizer.layout.buckets)


def test_buckets_follow_backward_after_the_first_step():
    registered = ["inner.weight", "left.weight", "right.weight", "out.weight"]
    reached = ["out.weight", "left.weight", "right.weight", "inner.weight"]
    for orders, num_buckets in run_on_ranks(layout_over_steps, 2):
        assert orders == [registered[::-1], reached]
        assert num_buckets >= 4


def own_data(step=0):
    x, y = data(step, 0, dist.get_world_size())
    rank, size = dist.get_rank(), dist.get_world_size()
    return x[rank::size], y[rank::size]


def expected_gradients(step=0, **net):
    model = make_net(**net)
    loss_of(model, *data(step, 0, dist.get_world_size()), MICROS[0] * dist.get_world_size()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients_of(booster, model):
    every = {n: full_gradient(booster, model, n) for n, _ in model.unwrap().named_parameters()}
    return {n: gradient for n, gradient in every.items() if gradient is not None}


def order_differs(stage):
    booster, model, optimizer = boost({"stage": stage})
    for _ in range(3):
        model.unwrap().left_first = dist.get_rank() == 0
        booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
        assert_same_tensors(gradients_of(booster, model), expected_gradients(), CLOSE)
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_produce_gradients_in_another_order(stage):
    run_on_ranks(order_differs, 2, stage)


def reentrant_checkpointing():
    booster, model, optimizer = boost(reentrant=True)
    for _ in range(3):
        booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
        assert_same_tensors(gradients_of(booster, model), expected_gradients(), CLOSE)
        optimizer.zero_grad()


def test_a_gradient_that_comes_in_parts_is_complete():
    run_on_ranks(reentrant_checkpointing, 2)


def reentrant_later():
    booster, model, optimizer = boost()
    for _ in range(2):
        booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
        model.unwrap().reentrant = True


def test_a_gradient_that_comes_in_parts_unexpectedly_raises():
    expect_on_ranks(GradientError, "was changed after it had been reduced over the ranks", reentrant_later, 2)


def plain_backward():
    booster, model, optimizer = boost({"stage": 1})
    for _ in range(2):
        loss_of(model, *own_data(), MICROS[0]).backward()
        assert_same_tensors(gradients_of(booster, model), expected_gradients(), CLOSE)
        optimizer.zero_grad()
    with booster.no_sync(model):
        loss_of(model, *own_data(), MICROS[0]).backward()
    loss_of(model, *own_data(), MICROS[0]).backward()
    twice = {name: 2 * gradient for name, gradient in expected_gradients().items()}
    assert_same_tensors(gradients_of(booster, model), twice, CLOSE)


def test_backward_of_the_loss_itself_is_reduced_too():
    run_on_ranks(plain_backward, 2)


VARIANTS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "whole": {"partition": "parameter"},
    "overlap": {"stage": 2, "overlap_allgather": True},
}


def freezes_and_unfreezes(options):
    booster, model, optimizer = boost(options)
    net = model.unwrap()
    reference = make_net()
    plain = OPTIMIZERS["sgd"](list(reference.parameters()))
    for step in range(4):
        for each in (net, reference):
            each.left.requires_grad_(step in (1, 3))
            each.out.requires_grad_(step != 3)
        booster.backward(loss_of(model, *own_data(step), MICROS[0]), optimizer)
        loss_of(reference, *data(step, 0, dist.get_world_size()), MICROS[0] * dist.get_world_size()).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        assert_same_tensors(net.state_dict(), reference.state_dict(), CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_may_be_frozen_and_unfrozen(variant):
    run_on_ranks(freezes_and_unfreezes, 2, VARIANTS[variant])


def starts_frozen(options):
    booster = Booster(plugin=LowLevelZeroPlugin(bucket_bytes=64, **options))
    net, reference = make_net(), make_net()
    for each in (net, reference):
        each.left.requires_grad_(requires_grad=False)
    model, optimizer, *_ = booster.boost(net, OPTIMIZERS["sgd"](list(net.parameters())))
    plain = OPTIMIZERS["sgd"](list(reference.parameters()))
    for step in range(4):
        if step == 2:
            for each in (net, reference):
                each.left.requires_grad_(requires_grad=True)
        booster.backward(loss_of(model, *own_data(step), MICROS[0]), optimizer)
        loss_of(reference, *data(step, 0, dist.get_world_size()), MICROS[0] * dist.get_world_size()).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        assert_same_tensors(net.state_dict(), reference.state_dict(), CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_frozen_at_boost_may_be_unfrozen(variant):
    run_on_ranks(starts_frozen, 2, VARIANTS[variant])


def group_added_later(options):
    booster = Booster(plugin=LowLevelZeroPlugin(bucket_bytes=64, **options))
    net, reference = make_net(), make_net()
    optimizers = [
        torch.optim.SGD([*each.inner.parameters(), *each.left.parameters()], lr=0.1, momentum=0.9)
        for each in (net, reference)
    ]
    model, optimizer, *_ = booster.boost(net, optimizers[0])
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(net.out.parameters()), "lr": 0.01})
            optimizers[1].add_param_group({"params": list(reference.out.parameters()), "lr": 0.01})
            assert optimizer.param_groups[1]["lr"] == 0.01
        booster.backward(loss_of(model, *own_data(step), MICROS[0]), optimizer)
        loss_of(reference, *data(step, 0, dist.get_world_size()), MICROS[0] * dist.get_world_size()).backward()
        if step == 0:  # also of parameters that no group holds
            expected = {n: p.grad for n, p in reference.named_parameters()}
            assert_same_tensors(gradients_of(booster, model), expected, CLOSE)
        for each, owner in ((optimizer, net), (optimizers[1], reference)):
            each.step()
            owner.zero_grad()
            each.zero_grad()
        assert_same_tensors(net.state_dict(), reference.state_dict(), CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_group_may_be_added_later(variant):
    run_on_ranks(group_added_later, 2, VARIANTS[variant])


def adds_wrong_group(which):
    _, model, optimizer = boost()
    own = which == "taken"
    optimizer.add_param_group({"params": [model.unwrap().left.weight if own else nn.Parameter(torch.ones(3))]})


def test_a_group_of_strangers_or_of_what_is_held_is_refused():
    expect_on_ranks(ConfigError, "is not one of the boosted model's", adds_wrong_group, 2, "strange")
    expect_on_ranks(ConfigError, "'left.weight' is in a parameter group already", adds_wrong_group, 2, "taken")


class Odd(nn.Module):
    """Mixed formats, an empty parameter, a scalar, a sparse embedding, a norm with statistics, and a layer left out."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.optional = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, tokens, use_optional):
        x = self.norm(self.table(tokens))
        x = self.wide(x.double()).float() * self.scalar + self.empty.sum()
        return self.optional(x) if use_optional else x


def odd_parameters(options):
    torch.manual_seed(dist.get_rank())  # the ranks are made equal by `boost`
    net = Odd()
    booster = Booster(plugin=LowLevelZeroPlugin(bucket_bytes=64, **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5))
    never = net.never.weight.detach().clone()
    reference = Odd()
    reference.load_state_dict(net.state_dict())
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        tokens = torch.arange(5) + step
        # The optional layer is used on the last rank only: its gradient is the mean of one and of nothing.
        (model(tokens, dist.get_rank() == 1).square().sum()).backward()
        loss = reference(tokens, use_optional=False).square().sum() / 2
        (loss + reference(tokens, use_optional=True).square().sum() / 2).backward()
        reference.table.weight.grad = reference.table.weight.grad.to_dense()
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        assert_same_tensors(gradients_of(booster, model), expected, CLOSE)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    assert torch.equal(net.never.weight, never), "no weight decay of what nobody used"
    ours, theirs = ({n: p.detach() for n, p in each.named_parameters()} for each in (model.unwrap(), reference))
    assert_same_tensors(ours, theirs, tolerance_for(torch.float16))
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_odd_parameters_train_as_in_one_process(variant):
    first, second = run_on_ranks(odd_parameters, 2, VARIANTS[variant])
    assert all(torch.equal(first[name], second[name]) for name in first), "buffers too are equal on every rank"


class WithStatistics(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = kind(6, track_running_stats=True)

    def forward(self, x):
        return self.norm(self.linear(x).T.unsqueeze(0))


def running_statistics(kind):
    torch.manual_seed(0)
    net = WithStatistics(kind)
    booster = Booster(plugin=LowLevelZeroPlugin())
    model, optimizer, *_ = booster.boost(net, OPTIMIZERS["sgd"](list(net.parameters())))
    for step in range(2):
        booster.backward(model(own_data(step)[0]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return net.norm.running_mean.clone(), net.norm.running_var.clone()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_are_rank_0_s_everywhere(kind):
    (mean, var), (other_mean, other_var) = run_on_ranks(running_statistics, 2, kind)
    assert bool(mean.any())
    assert torch.equal(mean, other_mean)
    assert torch.equal(var, other_var)


def strict_about_unused():
    booster = Booster(plugin=LowLevelZeroPlugin(unused="raise"))
    net = Odd()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.backward(model(torch.arange(5), dist.get_rank() == 1).sum(), optimizer)
    optimizer.step()


def test_unused_parameters_can_be_forbidden():
    errors = expect_on_ranks(GradientError, "took no part in backward", strict_about_unused, 2)
    unused = "rank 0: 'optional.weight', 'optional.bias', 'never.weight', 'never.bias'; rank 1: 'never.weight'"
    assert all(unused in str(error) for error in errors)


# ---- the manners of torch


def gradients_are_dropped(how):
    booster, model, optimizer = boost()
    booster.backward(loss_of(model, *own_data(1), MICROS[0]), optimizer)
    {"model": model.zero_grad, "optimizer": optimizer.zero_grad}[how]()
    booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
    assert_same_tensors(gradients_of(booster, model), expected_gradients(), CLOSE)
    optimizer.zero_grad(set_to_none=False)
    assert all(not gradient.any() for gradient in gradients_of(booster, model).values())
    booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
    assert_same_tensors(gradients_of(booster, model), expected_gradients(), CLOSE)


@pytest.mark.parametrize("how", ["model", "optimizer"])
def test_zero_grad_drops_reduced_gradients(how):
    run_on_ranks(gradients_are_dropped, 2, how)


def clips_by_itself(closure):
    booster, model, optimizer = boost({"max_norm": 0.25})
    reference = make_net()
    plain = OPTIMIZERS["sgd"](list(reference.parameters()))
    size = dist.get_world_size()
    for step in range(2):

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, *own_data(step), MICROS[0])
            booster.backward(loss, optimizer)
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        plain.zero_grad()
        loss_of(reference, *data(step, 0, size), MICROS[0] * size).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.25)
        plain.step()
        assert_same_tensors(model.state_dict(), reference.state_dict(), CLOSE)


@pytest.mark.parametrize("closure", [False, True])
def test_the_plugin_clips_each_step_where_told_to(closure):
    run_on_ranks(clips_by_itself, 2, closure)


def offloads(options):
    return boosted("adamw", options)[2]


def test_offload_where_there_is_no_accelerator_changes_nothing():
    plain, offloaded = (run_on_ranks(offloads, 2, {"cpu_offload": offload})[0] for offload in (False, True))
    assert all(torch.equal(plain[name], tensor) for name, tensor in offloaded.items())


def narrow(options, precision):
    booster = Booster("cpu", precision, LowLevelZeroPlugin(bucket_bytes=64, **options))
    net = make_net()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    for step in range(10):
        booster.backward(loss_of(model, *own_data(step), MICROS[0]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    kinds = {piece.values.dtype for piece in optimizer.layout.pieces().values()}
    masters = torch.zeros(36)
    for index, piece in optimizer.layout.pieces().items():
        if optimizer.names[index] == "left.weight":
            masters[piece.start : piece.stop] = piece.values.detach().flatten()
    dist.all_reduce(masters)
    return (
        {str(p.dtype) for p in net.parameters()},
        {str(kind) for kind in kinds},
        masters - make_net().left.weight.detach().flatten(),
    )


def test_masters_take_steps_that_bf16_would_round_away():
    for parameters, masters, moved in run_on_ranks(narrow, 2, {}, "bf16"):
        assert (parameters, masters) == ({"torch.bfloat16"}, {"torch.float32"})
        assert 0 < moved.abs().max() < 2**-10
    for parameters, masters, _ in run_on_ranks(narrow, 2, {"master_weights": False}, "bf16"):
        assert parameters == masters == {"torch.bfloat16"}


def narrow_wire():
    booster, model, optimizer = boost({"communication_dtype": "bf16"})
    booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
    assert_same_tensors(gradients_of(booster, model), expected_gradients(), tolerance_for(torch.bfloat16))
    assert any(not torch.equal(g, expected_gradients()[n]) for n, g in gradients_of(booster, model).items())


def test_gradients_may_travel_in_bf16():
    run_on_ranks(narrow_wire, 2)


def tied_by_memory():
    net = make_net()
    net.left.weight.data = net.right.weight.data
    Booster(plugin=LowLevelZeroPlugin()).boost(net, OPTIMIZERS["sgd"](list(net.parameters())))


def test_parameters_tied_by_memory_alone_are_refused():
    expect_on_ranks(ConfigError, "are two objects over the same memory", tied_by_memory, 2)


def refuses_lbfgs():
    net = make_net()
    Booster(plugin=LowLevelZeroPlugin()).boost(net, torch.optim.LBFGS(net.parameters()))


def test_lbfgs_is_refused_on_every_rank():
    expect_on_ranks(ConfigError, "LBFGS can't be sharded", refuses_lbfgs, 2)


def values_written_by_hand(precision):
    booster = Booster("cpu", precision, LowLevelZeroPlugin(bucket_bytes=64))
    net = make_net()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.0))
    for step in range(2):
        booster.backward(loss_of(model, *own_data(step), MICROS[0]), optimizer)
        if step == 1:
            with torch.no_grad():
                net.left.weight.fill_(0.5)
            model.load_state_dict({**model.state_dict(), "right.weight": torch.full((6, 6), 0.25)})
        optimizer.step()
        optimizer.zero_grad()
    assert bool((net.left.weight == 0.5).all())
    assert bool((net.right.weight == 0.25).all())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_written_into_parameters_stay(precision):
    run_on_ranks(values_written_by_hand, 2, precision)


def other_memory():
    booster, model, optimizer = boost()
    booster.backward(loss_of(model, *own_data(), MICROS[0]), optimizer)
    model.unwrap().left.weight.data = torch.ones(6, 6)
    optimizer.step()


def test_parameters_that_left_their_bucket_are_noticed():
    expect_on_ranks(ConfigError, "'left.weight' was given other memory after `boost`", other_memory, 2)


def state_made_before(optimizer_name):
    """Parameters named by the user, and state from steps in one process, go on under ZeRO."""
    net, reference = make_net(), make_net()
    make = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}[optimizer_name]
    optimizers = [make(list(each.named_parameters()), lr=0.01) for each in (net, reference)]
    size = dist.get_world_size()
    for each, plain in zip((net, reference), optimizers, strict=True):
        loss_of(each, *data(0, 0, size), MICROS[0] * size).backward()
        plain.step()
        plain.zero_grad()
    booster = Booster(plugin=LowLevelZeroPlugin(bucket_bytes=64))
    model, optimizer, *_ = booster.boost(net, optimizers[0])
    for step in range(1, 4):
        booster.backward(loss_of(model, *own_data(step), MICROS[0]), optimizer)
        loss_of(reference, *data(step, 0, size), MICROS[0] * size).backward()
        for each in (optimizer, optimizers[1]):
            each.step()
            each.zero_grad()
    held = optimizer.param_groups[0]
    assert len(held["param_names"]) == len(held["params"])
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_state_made_before_boost_moves_to_the_layout_of_the_first_step(name):
    run_on_ranks(state_made_before, 2, name)


def llama():
    """A Llama with a tied head under stage 2 and bf16: losses near those of one process, parameters equal on ranks."""
    from booster_testing.models import tiny_llama

    torch.manual_seed(0)
    net = tiny_llama(tie_word_embeddings=True)
    booster = Booster("cpu", "bf16", LowLevelZeroPlugin(stage=2, bucket_bytes=5000, max_norm=1.0))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))
    losses = []
    for step in range(16):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step % 2 + 10 * dist.get_rank()))
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_a_llama_learns():
    (losses, first), (_, second) = run_on_ranks(llama, 2)
    assert losses[-1] < losses[0] - 1
    assert all(torch.equal(first[name], second[name]) for name in first)
