from __future__ import annotations

import torch
from matrix import matrix
from torch import nn
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_fsdp import TorchFSDPPlugin
from booster_runtime.lazy import LazyInitContext
from booster_runtime.sharding.dtensor import local_of
from booster_testing import run_on_ranks
from booster_testing.models import TinyMixedBag, tiny_llama
from booster_testing.training import whole_model

MODELS = {
    "mixed bag": TinyMixedBag,
    "tied llama": lambda: tiny_llama(tie_word_embeddings=True),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, 3)),
}


def values_and_first_step(name, lazily, precision):
    """Return the whole model after `boost` and after one step."""
    torch.manual_seed(3)
    if lazily:
        with LazyInitContext():
            model = MODELS[name]()
    else:
        model = MODELS[name]()
    booster = Booster("cpu", precision, TorchFSDPPlugin(unit_min_numel=32))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained, lr=0.01))
    before = whole_model(booster, model)
    buffers = {key: buffer.clone() for key, buffer in model.unwrap().named_buffers()}
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert sharded
    assert sum(local_of(p).numel() for p in sharded) < sum(p.numel() for p in sharded)
    generator = torch.Generator().manual_seed(0)
    if name == "batch norm":
        output = model(torch.randn(4, 3, 3, 3, generator=generator))
    else:
        output = model(torch.randint(16, (2, 6), generator=generator))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    booster.backward(logits.float().square().mean(), optimizer)
    optimizer.step()
    return before, buffers, whole_model(booster, model)


@matrix(["batch norm-None"], name=MODELS, precision=[None, "bf16"])
def test_lazy_model_equals_eager_model_after_boost_and_a_step(name, precision):
    lazy = run_on_ranks(values_and_first_step, 2, name, True, precision)
    eager = run_on_ranks(values_and_first_step, 2, name, False, precision)
    for ours, theirs in zip(lazy, eager, strict=True):
        for got, expected in zip(ours, theirs, strict=True):
            assert got.keys() == expected.keys()
            assert [key for key in expected if not torch.equal(got[key], expected[key])] == []
