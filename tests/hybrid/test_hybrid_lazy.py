"""Lazy models under any mesh: the bits of eager ones, on every rank just what it keeps, and steps that equal theirs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from isolated_libraries import import_quietly
from matrix import matrix, named
from model_parity import MODELS, NAMES

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext
from booster_runtime.memory import is_absent
from booster_testing import run_on_ranks
from booster_testing.training import whole_model

DEEP = "transformers/t5_generation"
"""Has layers for four stages."""
CUT = (
    {"tp_size": 2, "pp_size": 2},
    {"pp_size": 2, "zero_stage": 1},
    {"tp_size": 2, "zero_stage": 2},
    {"tp_size": 2, "zero_stage": 3},
)
CUT_IDS = ("tp2pp2", "pp2dp2zero1", "tp2dp2zero2", "tp2dp2zero3")


def make(zoo, *, lazily):
    with LazyInitContext() if lazily else contextlib.nullcontext() as context:
        model = zoo.seeded()
    assert context is None or not context.run_eagerly
    some = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": some, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.02)


def boosted(zoo, options, precision=None, *, lazily):
    torch.manual_seed(1)  # data parallel ranks draw from streams of their own afterwards, which begin here
    booster = Booster("cpu", precision, HybridParallelPlugin(**options, example_batch=zoo.share(0, 0, 2)))
    model, optimizer = make(zoo, lazily=lazily)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def held(model):
    """Return what lies here of the user's own model, and how its parameters are used."""
    buffers = dict(model.named_buffers())
    tensors = {**dict(model.named_parameters()), **buffers}
    # What is in shards has no values here.
    return {name: each.detach().clone() for name, each in tensors.items() if not is_absent(each)}


def groups(optimizer):
    return [
        {**group, "params": [tuple(values.shape) for values in group["params"]]} for group in optimizer.param_groups
    ]


def assert_same(lazy, eager):
    assert lazy.keys() == eager.keys()
    for name, tensor in eager.items():
        assert lazy[name].dtype == tensor.dtype, name
    assert [name for name, tensor in eager.items() if not torch.equal(lazy[name], tensor)] == []


def compare(name, meshes, precision=None):
    zoo = MODELS[name]
    import_quietly(zoo.needs)
    for options in meshes:
        booster, eager, eager_optimizer = boosted(zoo, options, precision, lazily=False)
        state = torch.get_rng_state()
        expected, whole = held(eager.unwrap()), whole_model(booster, eager)
        booster, lazy, optimizer = boosted(zoo, options, precision, lazily=True)
        assert torch.equal(torch.get_rng_state(), state)
        assert_same(held(lazy.unwrap()), expected)
        assert_same(whole_model(booster, lazy), whole)
        assert groups(optimizer) == groups(eager_optimizer)


SLOW = pytest.mark.slow


@matrix(["heads/falcon_groups_lm-tp2dp2zero3"], 1, name=NAMES, options=named(CUT, CUT_IDS))
def test_values_are_those_of_an_eager_model(name, options):
    run_on_ranks(compare, 4, name, [options])


@pytest.mark.parametrize(
    "name",
    [
        "transformers/llama_tied",
        pytest.param("transformers/glm", marks=SLOW),
        pytest.param("transformers/falcon", marks=SLOW),
    ],
)
def test_uneven_and_shared_heads_train(name):
    run_on_ranks(compare, 3, name, [{"tp_size": 3}])


def first_steps(zoo, booster, model, optimizer):
    """Return the losses of two steps that this rank knows of, and the model after them."""
    data_rank, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    losses = []
    for step in range(2):
        batch = zoo.share(step, data_rank, 4)
        if booster.plugin.config.pipeline.size > 1:
            losses.append(booster.execute_pipeline(iter([batch]), model, zoo.loss, optimizer)["loss"])
        else:
            losses.append(zoo.loss_of(model, batch).detach())
            booster.backward(zoo.loss_of(model, batch), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [loss for loss in losses if loss is not None], whole_model(booster, model)


def assert_same_steps(zoo, lazy, eager):
    losses, whole = first_steps(zoo, *lazy)
    expected_losses, expected = first_steps(zoo, *eager)
    assert all(torch.equal(*pair) for pair in zip(losses, expected_losses, strict=True))
    assert_same(whole, expected)


def train(name, options, precision):
    zoo = MODELS[name]
    eager, lazy = (boosted(zoo, options, precision, lazily=lazily) for lazily in (False, True))
    assert_same_steps(zoo, lazy, eager)


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        pytest.param({"tp_size": 2, "pp_size": 2}, None, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "zero_stage": 1}, "bf16", marks=SLOW),  # the next has masters, too
        ({"tp_size": 2, "zero_stage": 3}, "bf16"),
        pytest.param({"pp_size": 2, "zero_stage": 3}, None, marks=SLOW),
        pytest.param({"pp_size": 2, "zero_stage": 2, "pp_style": "zbv"}, "bf16", marks=pytest.mark.slow),
        pytest.param({"pp_size": 2, "pp_style": "interleaved"}, "fp16", marks=SLOW),
        ({"sp_size": 2, "sequence_parallelism_mode": "ring_attn", "zero_stage": 1}, None),
        pytest.param(
            {"tp_size": 2, "sequence_parallelism_mode": "split_gather", "zero_stage": 1, "cpu_offload": True},
            "bf16",
            marks=SLOW,
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_first_steps_are_those_of_an_eager_model(options, precision):
    is_deep = options.get("pp_style") in ("zbv", "interleaved")
    run_on_ranks(train, 4, DEEP if is_deep else "transformers/llama_tied", options, precision)


PRETRAINED = ("llama_tied", "gpt2_lm", "t5_generation", "mixtral")


def write_folder(folder, name):
    MODELS[f"transformers/{name}"].seeded().save_pretrained(folder)


def pretrained(folder, name, options, dtype, precision):
    zoo = MODELS[f"transformers/{name}"]
    found = []
    for lazily in (False, True):
        booster = Booster("cpu", precision, HybridParallelPlugin(**options, example_batch=zoo.share(0, 0, 2)))
        with LazyInitContext() if lazily else contextlib.nullcontext():
            model = type(zoo.seeded()).from_pretrained(folder, dtype=dtype)
        model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        found.append((held(model.unwrap()), whole_model(booster, model)))
    for lazy, eager in zip(found[1], found[0], strict=True):
        assert_same(lazy, eager)


@matrix(
    ["gpt2_lm-pp2dp2zero1-float32-bf16", "mixtral-tp2dp2zero3-float32-bf16"],
    2,
    name=PRETRAINED,
    options=named(CUT, CUT_IDS),
    **{
        "dtype, precision": [
            pytest.param("float32", None, marks=SLOW),  # no masters: the values of the parts alone
            ("float32", "bf16"),
            pytest.param("bfloat16", "bf16", marks=SLOW),  # as above, from rounded values
        ]
    },
)
def test_folders_go_straight_into_parts_and_masters(name, options, dtype, precision, tmp_path):
    run_on_ranks(write_folder, 1, tmp_path, name)
    run_on_ranks(pretrained, 4, tmp_path, name, options, dtype, precision, timeout_seconds=120)
