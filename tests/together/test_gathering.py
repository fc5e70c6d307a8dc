"""Whole parameters and optimizer state, read and changed by name during training, equal those of one process."""

import pytest
import torch

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient, full_state, gathered, set_full_gradient, set_full_state, train_batch
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import whole_model
from booster_zero import LowLevelZeroPlugin

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {}),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 8192}),
    "tp2": (HybridParallelPlugin, {"tp_size": 2}),
    "pp2": (HybridParallelPlugin, {"pp_size": 2}),
    "zero3": (HybridParallelPlugin, {"zero_stage": 3}),
}


def tokens(step):
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))


def train(plugin_class, options, precision):
    """Train two steps, change weights and state by name, train two more; return what was read and the parameters."""
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2)
    booster = Booster("cpu", precision, plugin=plugin_class(**options))
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    if "pp_size" in options:
        booster = Booster("cpu", precision, plugin=plugin_class(**options, example_batch=batch))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    read = {}

    def step(number):
        batch = {"input_ids": tokens(number)[rank::size], "labels": tokens(number)[rank::size]}
        train_batch(booster, iter([batch]), model, None, optimizer)

    for number in range(2):
        step(number)
    with gathered(booster, model, [WEIGHT, EMBEDDING]) as tensors:
        read["weight"] = tensors[WEIGHT].clone()
        tensors[EMBEDDING].zero_()  # a copy
    read["average"] = full_state(booster, model, WEIGHT, "momentum_buffer")
    with gathered(booster, model, [EMBEDDING, WEIGHT], writes=True) as tensors:
        if booster.context.coordinator.is_master():
            tensors[EMBEDDING][3] = 0.25
            tensors[WEIGHT].mul_(0.5)
    doubled = 2 * full_state(booster, model, WEIGHT, "momentum_buffer")
    set_full_state(booster, model, WEIGHT, "momentum_buffer", doubled)
    read["doubled"] = full_state(booster, model, WEIGHT, "momentum_buffer")
    read["embedding"] = whole_model(booster, model)[EMBEDDING]
    for number in range(2, 4):
        step(number)
    return {**read, **whole_model(booster, model)}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "pp2", "zero3")]


@pytest.mark.parametrize("name", ["zero1", "gemini", "tp2", *SLOW])  # those that cut tensors in ways of their own
def test_values_and_later_steps_equal_one_process(name):
    (expected,) = run_on_ranks(train, 1, SingleDeviceStrategy, {}, None)
    for found in run_on_ranks(train, 2, *PLUGINS[name], None):
        assert torch.equal(found["doubled"], 2 * found["average"])
        assert bool((found["embedding"][3] == 0.25).all())
        assert_same_tensors(found, expected, tolerance_for(torch.float32))


def masters_follow(plugin_class, options):
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2)
    booster = Booster("cpu", "bf16", plugin=plugin_class(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
    with gathered(booster, model, [WEIGHT], writes=True) as tensors:
        tensors[WEIGHT].fill_(0.75)
    with gathered(booster, model, [WEIGHT]) as tensors:
        assert bool((tensors[WEIGHT] == 0.75).all())
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    train_batch(booster, iter([batch]), model, None, optimizer)
    master = full_state(booster, model, WEIGHT, "master")
    assert master.dtype == torch.float32
    assert bool((master != 0.75).any()), "a small step moves the master"
    assert bool((master - 0.75).abs().max() < 1e-2), "from the value that was written"
    set_full_state(booster, model, WEIGHT, "master", torch.full_like(master, 0.123))
    with gathered(booster, model, [WEIGHT]) as tensors:
        assert torch.equal(tensors[WEIGHT], torch.full_like(tensors[WEIGHT], 0.123))


@pytest.mark.parametrize(
    "name", ["gemini", pytest.param("zero1", marks=pytest.mark.slow), pytest.param("zero3", marks=pytest.mark.slow)]
)
def test_masters_follow_and_lead(name):
    run_on_ranks(masters_follow, 2, *PLUGINS[name])


def train_with_set_gradients(plugin_class, options, precision):
    """Replace two gradients, one of a tied parameter, in each of three steps; return what was read and trained."""
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2, tie_word_embeddings=True)
    batch = {"input_ids": tokens(0), "labels": tokens(0)}
    example = {"example_batch": batch} if "pp_size" in options else {}
    booster = Booster("cpu", precision, plugin=plugin_class(**options, **example))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rank, size = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    is_first = booster.context.coordinator.is_master()
    read = {}
    for number in range(3):
        batch = {"input_ids": tokens(number)[rank::size], "labels": tokens(number)[rank::size]}
        if "pp_size" in options:
            booster.execute_pipeline(iter([batch]), model, lambda output, _: output.loss, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        for name in (WEIGHT, EMBEDDING):
            gradient = full_gradient(booster, model, name)
            drawn = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(number))
            set_full_gradient(booster, model, name, 2 * gradient + drawn if is_first else torch.zeros_like(gradient))
            read[f"{name} {number}"] = full_gradient(booster, model, name)
        read[f"norm {number}"] = optimizer.clip_grad_by_norm(3.0)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ConfigError, match="no gradient to replace"):
        set_full_gradient(booster, model, WEIGHT, torch.zeros(1))
    return {**read, **whole_model(booster, model)}


SETS = {
    **PLUGINS,
    "zero2 offload": (LowLevelZeroPlugin, {"stage": 2, "offload": "cpu"}),
    "tp2pp2": (HybridParallelPlugin, {"tp_size": 2, "pp_size": 2}),
}
SETS_BY_DEFAULT = ("fsdp", "zero1", "pp2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SETS_BY_DEFAULT else pytest.mark.slow) for name in SETS]
)
def test_set_gradients_are_those_of_one_process(name):
    (expected,) = run_on_ranks(train_with_set_gradients, 1, SingleDeviceStrategy, {}, None)
    for found in run_on_ranks(train_with_set_gradients, 4 if name == "tp2pp2" else 2, *SETS[name], None):
        assert_same_tensors(found, expected, tolerance_for(torch.float32))


def set_scaled(plugin_class, options):
    """Return a gradient that was set, as it is read under a loss scale, and the parameter's change in the step."""
    torch.manual_seed(0)
    model = tiny_llama(num_hidden_layers=2)
    booster = Booster("cpu", "fp16", plugin=plugin_class(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(input_ids=tokens(0), labels=tokens(0)).loss, optimizer)
    before = whole_model(booster, model)[WEIGHT]
    set_full_gradient(booster, model, WEIGHT, torch.full(before.shape, 0.5))
    read = full_gradient(booster, model, WEIGHT)
    optimizer.step()
    return read, before.float() - whole_model(booster, model)[WEIGHT].float()


@pytest.mark.parametrize("name", ["zero1", *[pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "gemini")]])
def test_a_set_gradient_gets_the_loss_scale(name):
    for read, change in run_on_ranks(set_scaled, 2, *PLUGINS[name]):
        assert bool((read == 0.5).all())
        torch.testing.assert_close(change, torch.full_like(change, 0.5), rtol=1e-3, atol=1e-3)


def gradients_that_cannot_be_set(plugin_class, options):
    model = tiny_llama(num_hidden_layers=2)
    booster = Booster("cpu", plugin=plugin_class(**options))
    others = [parameter for name, parameter in model.named_parameters() if name != WEIGHT]
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(others, lr=0.1))
    booster.backward(model(input_ids=tokens(0), labels=tokens(0)).loss, optimizer)
    gradient = full_gradient(booster, model, WEIGHT)
    set_full_gradient(booster, model, WEIGHT, 2 * gradient)  # it is trained, and counts where gradients are clipped
    assert torch.equal(full_gradient(booster, model, WEIGHT), 2 * gradient)
    rank = booster.context.coordinator.rank
    with pytest.raises(ConfigError, match="has shape"):
        set_full_gradient(booster, model, EMBEDDING, torch.zeros(1 + rank))
    whole = full_gradient(booster, model, EMBEDDING)
    with pytest.raises(TypeError, match=f"in the shape of '{EMBEDDING}'; got `list`"):
        set_full_gradient(booster, model, EMBEDDING, whole if rank else whole.tolist())  # rank 0's alone is wrong
    with pytest.raises(ConfigError, match=f"Did you mean '{EMBEDDING}'"):
        set_full_gradient(booster, model, EMBEDDING[:-1], gradient)


@pytest.mark.parametrize("name", ["tp2", pytest.param("zero1", marks=pytest.mark.slow)])
def test_gradients_that_cannot_be_set_raise_on_every_rank(name):
    run_on_ranks(gradients_that_cannot_be_set, 2, *PLUGINS[name])


def fail_in_the_block(booster, model):
    with gathered(booster, model, [WEIGHT], writes=True) as tensors:
        tensors[WEIGHT].zero_()
        message = "in the block"
        raise RuntimeError(message)


def refused(plugin_class, options):
    model = tiny_llama(num_hidden_layers=2)
    booster = Booster("cpu", plugin=plugin_class(**options))
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ConfigError, match=f"Did you mean '{EMBEDDING}'"), gathered(booster, model, [EMBEDDING[:-1]]):
        pass
    with pytest.raises(TypeError, match="list of names"), gathered(booster, model, EMBEDDING):
        pass
    rank = booster.context.coordinator.rank
    with pytest.raises(ConfigError, match="on rank 1"), gathered(booster, model, [WEIGHT, EMBEDDING][rank:]):
        pass
    with pytest.raises(ConfigError, match="momentum_buffer"):
        full_state(booster, model, WEIGHT, "momentum_buffer")  # before the first step
    before = whole_model(booster, model)[WEIGHT]
    with pytest.raises(RuntimeError, match="in the block"):
        fail_in_the_block(booster, model)
    assert torch.equal(whole_model(booster, model)[WEIGHT], before)


def test_what_is_not_there_is_named_on_every_rank():
    run_on_ranks(refused, 2, *PLUGINS["zero1"])
