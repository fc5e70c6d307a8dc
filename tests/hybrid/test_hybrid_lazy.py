"""Lazy models under any mesh: the bits of eager ones, on every rank just what it keeps, and steps that equal theirs."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from cases import decayed, train_boosted, zoo_case
from hybrid_runs import RING
from isolated_libraries import import_quietly
from matrix import matrix, named
from model_parity import MODELS, NAMES, parity_setting
from ranked import on_ranks

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_runtime import LazyInitContext
from booster_runtime.memory import is_absent
from booster_testing.training import whole_model

CUT = (
    {"tp_size": 2, "pp_size": 2},
    {"pp_size": 2, "zero_stage": 1},
    {"tp_size": 2, "zero_stage": 2},
    {"tp_size": 2, "zero_stage": 3},
)
CUT_IDS = ("tp2pp2", "pp2dp2zero1", "tp2dp2zero2", "tp2dp2zero3")


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


def compare(name, options, precision=None, folder=None, dtype=None):
    """Boost a lazy and an eager model, which are drawn or read from a folder."""
    zoo = MODELS[name]
    import_quietly(zoo.needs)
    found = []
    for lazily in (False, True):
        torch.manual_seed(1)  # data parallel ranks draw from streams of their own afterwards, which begin here
        booster = Booster("cpu", precision, HybridParallelPlugin(**options, example_batch=zoo.share(0, 0, 2)))
        with LazyInitContext() if lazily else contextlib.nullcontext() as context:
            model = zoo.seeded() if folder is None else type(zoo.seeded()).from_pretrained(folder, dtype=dtype)
        assert context is None or folder is not None or not context.run_eagerly
        model, optimizer, *_ = booster.boost(model, decayed(model))
        drawn = {"of the generator": torch.get_rng_state()}
        found.append((held(model.unwrap()), drawn, whole_model(booster, model), groups(optimizer)))
    *eager, eager_groups = found[0]
    *lazy, lazy_groups = found[1]
    for pair in zip(lazy, eager, strict=True):
        assert_same(*pair)
    assert lazy_groups == eager_groups


@matrix(["heads/falcon_groups_lm-tp2dp2zero3"], 1, name=NAMES, options=named(CUT, CUT_IDS))
@on_ranks(4)
def test_values_are_those_of_an_eager_model(name, options):
    compare(name, options)


@on_ranks(3)
def test_uneven_and_shared_heads_are_those_of_an_eager_model():
    compare("transformers/llama_tied", {"tp_size": 3})


STEPS = {
    "tp-pp": ({"tp_size": 2, "pp_size": 2}, None),
    "tp-zero3-bf16": ({"tp_size": 2, "zero_stage": 3}, "bf16"),
    "pp-zero3": ({"pp_size": 2, "zero_stage": 3}, None),
    "zbv-zero2-bf16": ({"pp_size": 2, "zero_stage": 2, "pp_style": "zbv"}, "bf16"),
    "interleaved-fp16": ({"pp_size": 2, "pp_style": "interleaved"}, "fp16"),
    "ring-zero1": ({**RING, "zero_stage": 1}, None),
    "offloaded-bf16": ({"tp_size": 2, "zero_stage": 1, "cpu_offload": True}, "bf16"),
}


@matrix(["tp-zero3-bf16", "ring-zero1"], name=STEPS)
@on_ranks(4)
def test_first_steps_are_those_of_an_eager_model(name):
    def trained(context):
        def build():
            with context:
                return MODELS[model].seeded()

        torch.manual_seed(1)  # data parallel ranks draw from streams of their own afterwards, which begin here
        return train_boosted(zoo_case(model, build=build, steps=2), setting).trained

    options, precision = STEPS[name]
    # Has layers for four stages, or two.
    model = f"transformers/{'t5_generation' if options.get('pp_style') in ('zbv', 'interleaved') else 'llama_tied'}"
    setting = parity_setting(model, options, 4, precision)
    eager, lazy = trained(contextlib.nullcontext()), trained(LazyInitContext())
    assert (lazy.losses, lazy.norms) == (eager.losses, eager.norms)
    assert_same(lazy.parameters, eager.parameters)


@matrix(
    ["gpt2_lm-pp2dp2zero1-float32-bf16", "mixtral-tp2dp2zero3-float32-bf16"],
    2,
    name=["llama_tied", "gpt2_lm", "t5_generation", "mixtral"],
    options=named(CUT, CUT_IDS),
    **{
        "dtype, precision": [
            pytest.param("float32", None, marks=pytest.mark.slow),  # no masters: the values of the parts alone
            ("float32", "bf16"),
            pytest.param("bfloat16", "bf16", marks=pytest.mark.slow),  # as above, from rounded values
        ]
    },
)
@on_ranks(4, timeout_seconds=120)
def test_folders_go_straight_into_parts_and_masters(name, options, dtype, precision, tmp_path):
    if dist.get_rank() == 0:
        MODELS[f"transformers/{name}"].seeded().save_pretrained(tmp_path)
    dist.barrier()
    compare(f"transformers/{name}", options, precision, tmp_path, dtype)
