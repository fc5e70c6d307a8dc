"""Lazy models under any mesh: the bits of eager ones, on every rank just what it keeps, and steps that equal theirs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from apart import import_quietly
from model_zoo import ZOO
from model_zoo.transformers_heads import HEADS

from booster_core import Booster, LazyInitContext
from booster_core.testing import run_on_ranks
from booster_core.testing.training import whole_model
from booster_hybrid import HybridParallelPlugin

MODELS = {**{name: model for name, model in ZOO.items() if name.startswith("transformers/")}, **HEADS}
WITHOUT_POLICY = ("albert", "wav2vec2", "hubert")
NAMES = [name for name in MODELS if not any(family in name for family in WITHOUT_POLICY) and "balanced" not in name]
DEFAULT = (
    "transformers/llama_tied",
    "transformers/mixtral",
    "transformers/gpt2_lm",
    "transformers/t5_generation",
    "transformers/whisper_generation",
    "heads/falcon_groups_lm",
)
"""Fused, shared, uneven and tied ones; the others are left to the long run."""
WITHOUT_STAGES = ("heads/t5_token_classification",)
CUT = ({"tp_size": 2, "pp_size": 2}, {"pp_size": 2, "zero_stage": 1}, {"tp_size": 2, "zero_stage": 2})


def make(zoo, *, lazily):
    with LazyInitContext() if lazily else contextlib.nullcontext() as context:
        model = zoo.seeded()
    assert context is None or not context.run_eagerly
    some = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": some, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.02)


def boosted(zoo, options, precision=None, *, lazily):
    booster = Booster("cpu", precision, HybridParallelPlugin(**options, **example(zoo, options)))
    model, optimizer = make(zoo, lazily=lazily)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def example(zoo, options):
    return {"example_batch": zoo.share(0, 0, 2)} if options.get("pp_size", 1) > 1 else {}


def held(model):
    """Return what lies here of the user's own model, and how its parameters are used."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


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


def cases(names):
    return [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", cases(NAMES))
def test_values_are_those_of_an_eager_model(name):
    meshes = [options for options in CUT if "pp_size" not in options or name not in WITHOUT_STAGES]
    run_on_ranks(compare, 4, name, meshes)


@pytest.mark.parametrize("name", ["transformers/llama_tied", "transformers/glm", "transformers/falcon"])
def test_uneven_and_shared_heads(name):
    run_on_ranks(compare, 3, name, [{"tp_size": 3}])
