"""What losses are multiplied by, the loss scale of fp16 and the weights of blocks, is in each gradient exactly once.

A script that calls ``loss.backward()`` steps on the right gradients, or the step raises; models that share a Booster, a
loss or a clipping norm train as in one process.
"""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from matrix import matrix
from ranked import on_ranks
from reference_plugins import ReferencePlugin
from torch import nn

from booster_core import Booster, LossScaleConfig, PrecisionPolicy
from booster_core.errors import ConfigError, GradientError
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import accumulate, full_gradient, join, set_full_gradient
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "single": lambda: None,
    "third party": ReferencePlugin,
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "zero-1": lambda: LowLevelZeroPlugin(stage=1, bucket_bytes=200),
    "zero-2": lambda: LowLevelZeroPlugin(stage=2, bucket_bytes=200),
    "gemini": lambda: GeminiPlugin(min_chunk_bytes=256),
    "hybrid": lambda: HybridParallelPlugin(zero_stage=1),
}
SCALE = 8.0
FP16 = PrecisionPolicy(compute_dtype=torch.float16, loss_scale=LossScaleConfig(initial_scale=SCALE))


def ranks_of(plugin):
    return 1 if plugin == "single" else 2


def net(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def rows(number):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def boosted(booster, seed):
    model = net(seed)
    return booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


def loss_of(model, number):
    return model(rows(number)).float().square().mean()


def gradients(booster, model):
    names = [name for name, _ in net(0).named_parameters()]
    return {name: full_gradient(booster, model, name).clone() for name in names}


def plain_gradients(seed, *numbers):
    """Return the gradients of the mean loss over some batches."""
    model = net(seed)
    sum(loss_of(model, number) for number in numbers).div(len(numbers)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def of_the_loss(booster, model, optimizer):
    loss_of(model, 0).backward()


def of_a_part(booster, model, optimizer):
    booster.backward(loss_of(model, 0), optimizer)
    loss_of(model, 1).backward()


def accumulated(booster, model, optimizer):
    for number in range(2):
        with accumulate(booster, model, 2):
            loss_of(model, number).backward()


def accumulated_in_part(booster, model, optimizer):
    for number in range(2):
        with accumulate(booster, model, 2):
            booster.backward(loss_of(model, number), optimizer)
            if number == 0:
                (0.1 * loss_of(model, number)).backward()


def joined(booster, model, optimizer):
    """Call ``loss.backward()`` for a batch that is the last one of a rank and not of the other."""
    number = 1 + booster.context.coordinator.rank
    for x in join(booster, [rows(each) for each in range(number)]):
        last = model(x).float().square().mean()
        if booster.loss_weight(model) != 1:
            last.backward()
            return
        booster.backward(last, optimizer)
        optimizer.zero_grad()


WAYS = {
    "of the loss": (FP16, of_the_loss),
    "of a part": (FP16, of_a_part),
    "accumulated": ("fp32", accumulated),
    "accumulated in part": ("fp32", accumulated_in_part),
    "joined": ("fp32", joined),
}


@pytest.mark.parametrize("plugin", ["single", "third party", "ddp", "fsdp"])  # elsewhere, `.grad` can't be assigned
@on_ranks(ranks_of)
def test_gradients_that_a_script_assigns_without_a_backward_are_not_divided(plugin):
    booster = Booster("cpu", FP16, PLUGINS[plugin]())
    model, optimizer = boosted(booster, 0)
    booster.backward(loss_of(model, 0), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    before = whole_model(booster, model)
    for parameter in booster.unwrap(model).parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    after = whole_model(booster, model)
    changes = [(after[name] - before[name]).flatten() for name in before]
    for change in changes:
        torch.testing.assert_close(change, torch.full_like(change, -0.125), rtol=0, atol=2**-10)  # of fp16


EACH = [(plugin, way) for plugin in PLUGINS for way in WAYS if (plugin, way) != ("single", "joined")]
"""One rank has as many batches as itself."""


@matrix(
    [f"{plugin}-of the loss-False" for plugin in PLUGINS]
    + [f"{plugin}-accumulated in part-True" for plugin in PLUGINS]
    + ["ddp-joined-True", "zero-1-of a part-True", "fsdp-accumulated-False"],
    2,
    **{"plugin, way": EACH},
    clips=[False, True],
)
@on_ranks(ranks_of)
def test_a_step_on_gradients_without_the_factors_raises(plugin, way, clips):
    precision, backward = WAYS[way]
    booster = Booster("cpu", precision, PLUGINS[plugin]())
    model, optimizer = boosted(booster, 0)
    backward(booster, model, optimizer)
    use = partial(optimizer.clip_grad_by_norm, 1.0) if clips else optimizer.step
    with pytest.raises(GradientError, match=r"call `booster.backward\(loss, optimizer\)` in place of `loss.backward"):
        use()
    model.zero_grad()
    tolerance = tolerance_for(torch.float16 if precision is FP16 else torch.float32)
    assert_same_tensors(whole_model(booster, model), net(0).state_dict(), tolerance)
    booster.backward(loss_of(model, 0), optimizer)
    assert_same_tensors(gradients(booster, model), plain_gradients(0, 0), tolerance)
    optimizer.step()


@matrix(
    ["single-True", "ddp-True", "ddp-False", "fsdp-True", "zero-1-False"], plugin=list(PLUGINS), nested=[True, False]
)
@on_ranks(ranks_of)
def test_a_block_weighs_the_losses_of_its_model_alone(plugin, nested):
    """Accumulate over two batches of a model, in a block around the other's too, or around a loss of the other."""
    booster = Booster("cpu", "fp32", PLUGINS[plugin]())
    (first, of_first), (second, of_second) = boosted(booster, 0), boosted(booster, 1)
    for number in range(2):
        with accumulate(booster, first, 2), accumulate(booster, second, 2) if nested else nullcontext():
            booster.backward(loss_of(first, number), of_first)
            if nested or number:
                booster.backward(loss_of(second, number), of_second)
    found = gradients(booster, first), gradients(booster, second)
    of_first.step()
    of_second.step()
    first, second = found
    assert_same_tensors(first, plain_gradients(0, 0, 1), tolerance_for(torch.float32))
    numbers = (0, 1) if nested else (1,)
    assert_same_tensors(second, plain_gradients(1, *numbers), tolerance_for(torch.float32))


@pytest.mark.parametrize("plugin", ["single", "ddp", "fsdp"])
@on_ranks(ranks_of)
def test_a_loss_has_one_weight(plugin):
    """Share a loss of blocks that weigh it differently."""
    booster = Booster("cpu", "fp32", PLUGINS[plugin]())
    (first, of_first), (second, of_second) = boosted(booster, 0), boosted(booster, 1)
    with accumulate(booster, first, 2), accumulate(booster, second, 4):
        with pytest.raises(ConfigError, match=r"weigh it by \[0.25, 0.5\]"):
            booster.backward(second(first(rows(0))).square().mean(), [of_first, of_second])
        booster.backward(second(first(rows(0))).square().mean(), of_first)
    with accumulate(booster, second, 4), accumulate(booster, first, 1):
        of_first.step()
        of_second.refuses_step = None
        with pytest.raises(GradientError, match=r"multiplied by 0\.5, in a block that asks for 0\.25"):
            of_second.step()


def plain_pair(values=()):
    """Return the parameters of both models with gradients of a loss through them, at some values."""
    models = [net(0), net(1)]
    for model, tensors in zip(models, values, strict=False):
        model.load_state_dict(tensors)
    models[1](models[0](rows(1))).square().mean().backward()
    return [parameter for model in models for parameter in model.parameters()]


@matrix(
    [f"{plugin}-passed{number}" for plugin, number in zip(PLUGINS, [2, 0, 1, 2, 0, 2, 1, 2], strict=True)],
    plugin=list(PLUGINS),
    passed=[[0], [1], [0, 1]],
)
@on_ranks(ranks_of)
def test_models_that_share_a_loss_have_one_loss_scale(plugin, passed):
    """Overflow in the second model only; return what moved, and the gradients of the step after."""
    booster = Booster("cpu", FP16, PLUGINS[plugin]())
    (first, of_first), (second, of_second) = pair = boosted(booster, 0), boosted(booster, 1)
    optimizers = [of_first, of_second]
    chosen = [optimizers[each] for each in passed]
    before = [whole_model(booster, model) for model, _ in pair]
    booster.backward(second(first(rows(0))).float().square().mean(), chosen)
    if plugin == "third party":
        second.unwrap().get_parameter("0.weight").grad.fill_(math.inf)
    else:
        set_full_gradient(booster, second, "0.weight", torch.full((6, 6), math.inf))
    for each in optimizers:
        each.step()
        each.zero_grad()
    after = [whole_model(booster, model) for model, _ in pair]
    moved = [not torch.equal(old["0.weight"], new["0.weight"]) for old, new in zip(before, after, strict=True)]
    scales = [each.loss_scaler.scale for each in optimizers]
    booster.backward(second(first(rows(1))).float().square().mean(), chosen)
    found = [*gradients(booster, first).values(), *gradients(booster, second).values()]
    for each in optimizers:
        each.step()
    good = [each.loss_scaler.num_good_steps for each in optimizers]
    assert moved == [passed != [0, 1], False]
    assert scales == [SCALE / 2] * 2
    assert good == [1, 1]
    for gradient, plain in zip(found, plain_pair(after), strict=True):
        # Products in fp16 against fp32; a wrong scale is a factor of two.
        torch.testing.assert_close(gradient, plain.grad, rtol=0.02, atol=2e-4)


@matrix(1, plugin=list(PLUGINS))
@on_ranks(ranks_of)
def test_gradients_of_two_models_are_clipped_by_their_joint_norm(plugin):
    booster = Booster("cpu", "fp32", PLUGINS[plugin]())
    (first, of_first), (second, of_second) = boosted(booster, 0), boosted(booster, 1)
    booster.backward(second(first(rows(1))).square().mean(), [of_first, of_second])
    norm = booster.clip_grad_by_norm([of_first, of_second], 0.05)
    found = [*gradients(booster, first).values(), *gradients(booster, second).values()]
    of_first.step()
    of_second.step()
    clipped = plain_pair()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(clipped, 0.05))
    for gradient, plain in zip(found, clipped, strict=True):
        torch.testing.assert_close(gradient, plain.grad)


def test_one_optimizer_of_two_models_is_refused_with_the_ways_that_work():
    first, second = net(0), net(1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match=r"one `nn.Module` that holds both.*`booster.clip_grad_by_norm\(\["):
        Booster("cpu").boost(first, optimizer)
