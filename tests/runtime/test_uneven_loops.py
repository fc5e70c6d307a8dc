"""`join` by itself, under a plugin that replicates: what it weighs, what ends it, and what it refuses."""

import pytest
import torch
from cases import own_loss
from ranked import on_ranks, raises_on_ranks
from reference_plugins import ReferencePipelinePlugin, ReferencePlugin
from uneven_runs import NUM_BATCHES, assert_steps_follow_batches, batches_of, boosted

from booster_core.errors import ConfigError, GradientError
from booster_runtime import join, train_batch
from booster_testing import expect_on_ranks


@pytest.mark.parametrize("plugin", [ReferencePlugin(), ReferencePipelinePlugin()], ids=["plain", "pipeline"])
def test_steps_follow_the_ranks_that_have_batches(plugin):
    assert_steps_follow_batches(plugin, 2, in_pipeline=isinstance(plugin, ReferencePipelinePlugin))


def with_batches(*of_ranks):
    booster, model, optimizer, index = boosted(ReferencePlugin())
    for x in join(booster, of_ranks[index]):
        booster.backward(own_loss(model(x), None), optimizer)
        optimizer.step()


def test_a_rank_without_any_batch_is_named_on_every_rank():
    expect_on_ranks(ConfigError, "no batch at all", with_batches, 2, [], [torch.ones(2, 8)])


@on_ranks(2)
def test_no_batch_on_any_rank_is_no_step():
    with_batches([], [])


@raises_on_ranks(OSError, "disk gone", 2)
def test_an_error_of_one_ranks_batches_raises_on_every_rank():
    def failing():
        yield torch.ones(2, 8)
        msg = "disk gone"
        raise OSError(msg)

    with_batches(batches_of(1), failing())


@raises_on_ranks(GradientError, r"multiply its loss by [02], .* in place of `loss\.backward\(\)`", 2)
def test_gradients_that_were_not_weighed_raise_on_every_rank():
    booster, model, optimizer, index = boosted(ReferencePlugin())
    for x in join(booster, batches_of(index)):
        own_loss(model(x), None).backward()
        optimizer.step()


@raises_on_ranks(ConfigError, "`train_batch` does not know which batches", 2)
def test_whole_batches_can_not_be_joined():
    booster, model, optimizer, index = boosted(ReferencePlugin())
    train_batch(booster, join(booster, batches_of(index)), model, own_loss, optimizer)


@on_ranks(2)
def test_steps_after_a_loop_that_was_left_are_not_weighed():
    """Leave the loop where one rank has run out, and take one more step on other batches."""
    booster, model, optimizer, index = boosted(ReferencePlugin())
    for number, x in enumerate(join(booster, batches_of(index))):
        optimizer.zero_grad()
        booster.backward(own_loss(model(x), None), optimizer)
        optimizer.step()
        if number == NUM_BATCHES[0]:
            break
    optimizer.zero_grad()
    booster.backward(own_loss(model(torch.ones(2, 8)), None), optimizer)
    gradient = model.unwrap().layers[1].weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    own_loss(model.unwrap().eval()(torch.ones(2, 8)), None)
    first, second = booster.context.coordinator.all_gather_object(gradient)
    assert torch.equal(first, second)
    assert float(first.abs().sum()) > 0
