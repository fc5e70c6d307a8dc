"""A model that several optimizers train, each a part of it: compared with plain torch in one process.

Muon for the matrices and AdamW for the rest is what Muon's authors train transformers by, and what two optimizers of
one model are used for most.
"""

import math

import pytest
import torch
from torch import nn

from booster_core import Booster, LossScaleConfig, PrecisionPolicy
from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import train_batch
from booster_runtime.sharding import local_of
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

STEPS, MAX_NORM = 4, 0.5
RANKS = {"single": 1, "ddp": 2, "fsdp": 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def make():
    torch.manual_seed(3)
    model = Net()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.05)]


def batch(step):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def one_process():
    """Return the weights after training in plain torch, and the norms of the gradients."""
    model, optimizers = make()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    norms = []
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        for each in (*optimizers, *schedulers):
            each.step()
        for each in optimizers:
            each.zero_grad()
    return dict(model.state_dict()), norms


def trained(plugin, root):
    booster = Booster("cpu", plugin=plugin)
    model, optimizers = make()
    schedulers = tuple(torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers)
    model, boosted, _, _, steered = booster.boost(model, optimizers, lr_scheduler=schedulers)
    assert type(boosted) is list
    assert steered == schedulers
    assert [each.unwrap() for each in boosted] == optimizers
    coordinator = DistCoordinator()
    norms = []
    for step in range(STEPS):
        if step == STEPS // 2:  # go on in new objects, from one checkpoint of both optimizers
            booster.save_checkpoint(root, model=model, optimizer=boosted, lr_scheduler=steered, step=step)
            booster = Booster("cpu", plugin=plugin)
            model, optimizers = make()
            schedulers = tuple(torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers)
            model, boosted, _, _, steered = booster.boost(model, tuple(optimizers), lr_scheduler=schedulers)
            assert type(boosted) is tuple
            booster.load_checkpoint(root, model=model, optimizer=boosted, lr_scheduler=steered)
        own = batch(step).chunk(coordinator.world_size)[coordinator.rank]
        booster.backward(model(own).square().mean(), boosted[0])
        norms.append(float(boosted[step % 2].clip_grad_by_norm(MAX_NORM)))  # of the whole model, by either
        for each in (*boosted, *steered):
            each.step()
        for each in boosted:
            each.zero_grad()
    return whole_model(booster, model), norms


@pytest.mark.parametrize("plugin", RANKS)
def test_training_equals_one_process_through_a_checkpoint(plugin, tmp_path):
    expected, expected_norms = one_process()
    for weights, norms in run_on_ranks(trained, RANKS[plugin], plugin, tmp_path / "run"):
        assert_same_tensors(weights, expected, tolerance_for(torch.float32))
        assert norms == pytest.approx(expected_norms, rel=1e-5)


def trained_by_train_batch(plugin):
    booster = Booster("cpu", plugin=plugin)
    model, optimizers = make()
    model, boosted, *_ = booster.boost(model, optimizers)
    coordinator = DistCoordinator()
    for step in range(STEPS):
        parts = [each.chunk(coordinator.world_size)[coordinator.rank] for each in batch(step).chunk(2)]
        train_batch(
            booster,
            iter([(part,) for part in parts]),
            model,
            lambda outputs, _: outputs.square().mean(),
            boosted,
            accumulation=2,
            max_norm=MAX_NORM,
        )
    return whole_model(booster, model)


@pytest.mark.parametrize("plugin", RANKS)
def test_train_batch_steps_all_of_them(plugin):
    model, optimizers = make()
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
    for weights in run_on_ranks(trained_by_train_batch, RANKS[plugin], plugin):
        assert_same_tensors(weights, dict(model.state_dict()), tolerance_for(torch.float32))


def overflow_in_one(plugin, overflowing):
    """Return for each step whether weights of each optimizer moved, and the loss scale after it."""
    config = LossScaleConfig(initial_scale=8.0, growth_interval=2)
    precision = PrecisionPolicy(compute_dtype=torch.float16, loss_scale=config)
    booster = Booster("cpu", precision, plugin)
    model, optimizers = make()
    model, boosted, *_ = booster.boost(model, optimizers)
    own = model.unwrap()
    watched = [own.first.weight, own.scale]  # of Muon, of AdamW
    found = []
    for step in range(3):
        before = [local_of(each).clone() for each in watched]
        booster.backward(model(batch(step)[:4]).square().mean(), boosted)
        if step == 0 and DistCoordinator().is_master:
            local_of(watched[overflowing].grad).view(-1)[0] = math.inf
        for each in boosted:
            each.step()
        for each in boosted:
            each.zero_grad()
        found.append(
            (
                [not torch.equal(old, local_of(new)) for old, new in zip(before, watched, strict=True)],
                boosted[0].loss_scaler.scale,
            )
        )
    return found, boosted[0].loss_scaler is boosted[1].loss_scaler


@pytest.mark.parametrize("overflowing", [0, 1])
@pytest.mark.parametrize("plugin", RANKS)
def test_an_overflow_in_one_skips_the_step_of_all(plugin, overflowing):
    for found, is_shared in run_on_ranks(overflow_in_one, 1, plugin, overflowing):
        assert found == [([False, False], 4.0), ([True, True], 4.0), ([True, True], 8.0)]
        assert is_shared


def save_some(root):
    booster = Booster("cpu", plugin="ddp")
    model, optimizers = make()
    model, boosted, *_ = booster.boost(model, optimizers)
    with pytest.raises(ConfigError, match="got 1 of the 2 optimizers"):
        booster.save_checkpoint(root, model=model, optimizer=boosted[0], step=1)
    with pytest.raises(ConfigError, match="got 1 of the 2 optimizers"):
        booster.save_optimizer(boosted[1], root / "optimizer")
    booster.save_optimizer(boosted, root / "optimizer")
    booster.load_optimizer(boosted, root / "optimizer")


def test_a_checkpoint_has_the_state_of_all_or_none(tmp_path):
    run_on_ranks(save_some, 2, tmp_path)


def move(root, source, target):
    """Train under one plugin, save, and go on under another; both as one process does."""
    coordinator = DistCoordinator()
    for plugin, steps in ((source, range(2)), (target, range(2, STEPS))):
        booster = Booster("cpu", plugin=plugin)
        model, optimizers = make()
        model, boosted, *_ = booster.boost(model, optimizers)
        if plugin == target:
            booster.load_checkpoint(root, model=model, optimizer=boosted)
        for step in steps:
            own = batch(step).chunk(coordinator.world_size)[coordinator.rank]
            booster.backward(model(own).square().mean(), boosted)
            for each in boosted:
                each.step()
            for each in boosted:
                each.zero_grad()
        if plugin == source:
            booster.save_checkpoint(root, model=model, optimizer=boosted, step=2)
    return whole_model(booster, model)


@pytest.mark.parametrize(("source", "target"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_a_checkpoint_moves_between_plugins(source, target, tmp_path):
    model, optimizers = make()
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
    for weights in run_on_ranks(move, 2, tmp_path / "run", source, target):
        assert_same_tensors(weights, dict(model.state_dict()), tolerance_for(torch.float32))


PLUGINS = {
    "zero": LowLevelZeroPlugin,
    "gemini": GeminiPlugin,
    "hybrid": HybridParallelPlugin,
}


def boost_two(name):
    model, optimizers = make()
    Booster("cpu", plugin=PLUGINS[name]()).boost(model, optimizers)


@pytest.mark.parametrize("name", PLUGINS)
def test_other_strategies_say_that_they_take_one(name):
    expect_on_ranks(ConfigError, f"'{name}.*trains a model by one optimizer; got 2", boost_two, 2, name)


def test_a_parameter_belongs_to_one():
    model, _ = make()
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.scale], lr=0.1)]
    with pytest.raises(ConfigError, match="in two of the optimizers, such as 'scale' in those at 0 and 1"):
        Booster("cpu").boost(model, twice)
