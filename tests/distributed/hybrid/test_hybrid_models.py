"""Models and heads under tensor parallelism: loss, gradients, norm and parameters are those of one process.

fp32 is compared tightly. In bf16 one process is no truth either: what is bounded is the distance to fp32, by a
multiple of that of one process whose parameters are rounded alike.
"""

from __future__ import annotations

import copy
from fnmatch import fnmatch

import pytest
import torch
import torch.distributed as dist
from apart import import_quietly
from model_zoo import ZOO
from model_zoo.transformers_heads import HEADS

from booster_core import Booster
from booster_core.testing import run_on_ranks
from booster_core.testing.compare import assert_same_tensors, tolerance_for
from booster_core.testing.training import whole_model
from booster_hybrid import HybridParallelPlugin

STEPS = 3
MODELS = {**{name: model for name, model in ZOO.items() if name.startswith("transformers/")}, **HEADS}
WITHOUT_POLICY = ("albert", "wav2vec2", "hubert")
NAMES = [name for name in MODELS if not any(family in name for family in WITHOUT_POLICY) and "balanced" not in name]
DEFAULT = (
    "heads/llama_classification",
    "heads/llama_token_classification",
    "heads/llama_question_answering",
    "heads/qwen3_lm",
    "heads/falcon_groups_lm",
    "heads/blip2_t5",
    "heads/t5_token_classification",
    "transformers/mixtral",
    "transformers/deepseek_v3",
    "transformers/gpt2_double_heads",
    "transformers/bert_pretraining",
    "transformers/t5_generation",
    "transformers/bloom",
    "transformers/falcon_alibi",
    "transformers/vit_classification",
    "transformers/whisper_generation",
    "transformers/sam",
    "transformers/blip2",
)
"""One of each family and head; the others are left to the long run."""
NO_EFFECT = 1e-6
"""Rounding in a gradient that is zero, as a fraction of the model's largest: a few of fp32's 2**-24."""
CANCELLING = {"transformers/sam"}
"""Models whose gradients are small sums of large terms of either sign, which only fp64 leaves enough digits."""
NARROW = 2.5
"""How much farther from fp32 than one process in bf16: sums over ranks round once more."""


def make_optimizer(model):
    # The epsilon is above most gradients, so that rounding errors of tiny ones stay tiny in the parameters.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-2, weight_decay=0.0)


def seeded(zoo):
    return zoo.seeded().double() if zoo.name in CANCELLING else zoo.seeded()


def loss_of(zoo, model, batch):
    if zoo.name in CANCELLING:
        batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    return zoo.loss_of(model, batch)


def plainly(zoo, data_size):
    model = seeded(zoo)
    optimizer = make_optimizer(model)
    losses, norms, gradients = [], [], []
    for step in range(STEPS):
        loss = loss_of(zoo, model, zoo.whole(step, data_size, 4))
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, dict(model.named_parameters())


def compare(names, options):
    for name in names:
        zoo = MODELS[name]
        import_quietly(zoo.needs)
        try:
            compare_one(zoo, options)
        except Exception as error:
            msg = f"{name} under {options}"
            raise AssertionError(msg) from error


def compare_one(zoo, options):
    plugin = HybridParallelPlugin(**options)
    booster = Booster("cpu", plugin=plugin)
    data_size = dist.get_world_size() // plugin.config.tensor.size
    data_rank = dist.get_rank() // plugin.config.tensor.size
    losses, norms, gradients, parameters = plainly(zoo, data_size)
    original = seeded(zoo)
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    for step in range(STEPS):
        loss = loss_of(zoo, model, zoo.share(step, data_rank, 4))
        booster.backward(loss, optimizer)
        found = {key: booster.full_gradient(model, key) for key in gradients[step]}
        assert_equal(found, gradients[step], zoo, largest(gradients[step]))
        assert float(optimizer.clip_grad_by_norm(1.0)) == pytest.approx(norms[step], rel=1e-5)
        if data_size == 1:
            assert float(loss.detach()) == pytest.approx(losses[step], rel=1e-5, abs=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    whole = whole_model(booster, model)
    trained = {key: parameter.detach() for key, parameter in parameters.items() if parameter.requires_grad}
    assert_equal({key: whole[key] for key in trained}, trained, zoo, largest(gradients[-1]))


def largest(gradients):
    return max(float(gradient.abs().max()) for gradient in gradients.values())


def assert_equal(ours, theirs, zoo, scale):
    without = {name for name in theirs if any(fnmatch(name, pattern) for pattern in zoo.no_effect)}
    differences = {name: float((ours[name] - theirs[name]).abs().max()) for name in without}
    assert all(difference <= NO_EFFECT * scale for difference in differences.values()), differences
    kept = theirs.keys() - without
    tolerance = tolerance_for(torch.float64 if zoo.name in CANCELLING else torch.float32)
    assert_same_tensors({name: ours[name] for name in kept}, {name: theirs[name] for name in kept}, tolerance)


def cases(names):
    return [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {"tp_size": 2}), (4, {"tp_size": 2, "zero_stage": 1})],
    ids=["tp2", "tp2dp2zero1"],
)
@pytest.mark.parametrize("name", cases(NAMES))
def test_training_equals_one_process(name, num_ranks, options):
    run_on_ranks(compare, num_ranks, [name], options)


def distance(found, truth):
    squares = [(float((found[key].float() - truth[key]).square().sum())) for key in truth if key in found]
    return (sum(squares) / sum(float(value.square().sum()) for value in truth.values())) ** 0.5


def narrow(name):
    zoo = MODELS[name]
    import_quietly(zoo.needs)
    batch = zoo.whole(0, 1, 4)
    whole = zoo.seeded()
    zoo.loss_of(whole, batch).backward()
    truth = {key: p.grad for key, p in whole.named_parameters() if p.grad is not None}
    rounded = copy.deepcopy(zoo.seeded()).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        zoo.loss_of(rounded, batch).backward()
    alone = {key: p.grad for key, p in rounded.named_parameters() if p.grad is not None}
    booster = Booster("cpu", "bf16", HybridParallelPlugin(tp_size=2))
    original = zoo.seeded()
    model, optimizer, *_ = booster.boost(original, make_optimizer(original))
    booster.backward(zoo.loss_of(model, batch), optimizer)
    found = {key: booster.full_gradient(model, key) for key in truth}
    assert all(gradient is not None for gradient in found.values())
    ours, theirs = distance(found, truth), distance(alone, truth)
    assert ours <= NARROW * theirs + 2**-8, (ours, theirs)


@pytest.mark.parametrize("name", cases(NAMES))
def test_bf16_is_as_near_to_fp32_as_one_process(name):
    run_on_ranks(narrow, 2, name)
