"""A model that comes in bf16 or fp16 is trained with updates in fp32 where nothing is asked, under every plugin.

transformers loads a checkpoint in the format of its files. A step of a usual learning rate is smaller than the distance
of two numbers in bf16, so that most elements of parameters in bf16 would never move.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from matrix import matrix
from plugin_runs import RUNS, backward, runs
from ranked import on_ranks
from torch import nn

from booster_core import Booster, PrecisionPolicy
from booster_core.ranks import DistCoordinator
from booster_runtime import LazyInitContext, full_gradient
from booster_testing.compare import Tolerance, assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_testing.training import assembled, whole_model

STEPS = 3
LEARNING_RATE = 1e-5
SAMPLES, LENGTH = 4, 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PLUGINS = {
    **runs("single", "ddp", "fsdp", "zero1", "zero2", "gemini"),
    "hybrid-dp2": RUNS["hybrid-dp"],
    "hybrid-zero3": RUNS["zero3"],
    "hybrid-tp2": RUNS["hybrid-tp"],
    "hybrid-pp2": RUNS["hybrid-pp"],
}
WITH_MASTERS = ["zero1", "zero2", "gemini", "hybrid-dp2", "hybrid-zero3", "hybrid-tp2", "hybrid-pp2"]


def num_ranks_of(name):
    return PLUGINS[name].num_ranks


def make_model(dtype, lazily=False):
    """Return a Llama whose parameters are narrow, and whose buffers are not: so transformers loads it."""
    torch.manual_seed(0)
    with LazyInitContext() if lazily else contextlib.nullcontext():
        model = tiny_llama()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def batch_of(number, index=0, size=1):
    """Return samples in which each token occurs, so that each row of the embedding is trained, or a replica's."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randperm(SAMPLES * LENGTH, generator=draw).view(SAMPLES, LENGTH)[index::size]
    return {"input_ids": tokens, "labels": tokens}


def updated(booster, model, optimizer):
    """Return what the optimizer updates, whole and by name: masters where there are such, else the parameters."""
    adapter = booster.state_adapter(model)
    whole = whole_model(booster, model)
    masters = assembled(shard for shard in adapter.optimizer_shards() if shard.state == "master")
    return whole | {name.removesuffix("/master"): values for name, values in masters.items()}


def run(booster, model, optimizer):
    """Train, and return the first step's gradients and what the optimizer updates, before and after."""
    before = updated(booster, model, optimizer)
    gradients = {}
    for number in range(STEPS):
        batch = batch_of(number, *booster.plugin.data_parallel_coordinates(DistCoordinator()))
        backward(booster, model, optimizer, batch)
        if not gradients:
            names = [each for each in before if before[each].is_floating_point()]
            gradients = {each: full_gradient(booster, model, each).float() for each in names}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, before, updated(booster, model, optimizer)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def trained(name, precision, lazily=False):
    booster = PLUGINS[name].make_booster()
    model = make_model(DTYPES[precision], lazily)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    return *run(booster, model, optimizer), booster.describe()


def moved(before, after):
    """Return which part of all elements has other values than before."""
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    return changed / sum(each.numel() for each in before.values())


def expected(precision):
    """Return the same of one process by torch alone: parameters in fp32, compute under autocast."""
    model = make_model(DTYPES[precision]).float()
    optimizer = adamw(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scale = 2.0**16 if precision == "fp16" else 1.0
    gradients = {}
    for number in range(STEPS):
        with torch.autocast("cpu", DTYPES[precision]):
            loss = model(**batch_of(number)).loss
        (loss * scale).backward()
        for name, parameter in model.named_parameters():
            parameter.grad /= scale
            if number == 0:
                gradients[name] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return gradients, before, {name: parameter.detach() for name, parameter in model.named_parameters()}


UPDATES = Tolerance(
    relative=0.05, reason="Adam makes a whole step of a gradient near zero, whose sign roundings decide"
)


@matrix(1, name=PLUGINS, precision=["bf16", "fp16"])
@on_ranks(num_ranks_of)
def test_all_elements_move_as_in_one_process(name, precision):
    """So does `describe` say of their formats."""
    gradients, before, after = expected(precision)
    formats = f"param {precision}, master fp32" if name in WITH_MASTERS else "param fp32, master none"
    found, found_before, found_after, described = trained(name, precision)
    (line,) = [each for each in described.splitlines() if each.startswith("precision")]
    assert line.replace("reduce fp32, ", "").startswith(f"precision  compute {precision}, {formats}")
    assert moved(found_before, found_after) >= 0.99
    assert_same_tensors(found, gradients, tolerance_for(DTYPES[precision]))
    assert all(torch.equal(found_before[each].float(), values) for each, values in before.items())
    steps = torch.cat([(after[each] - before[each]).flatten() for each in before])
    found_steps = torch.cat([(found_after[each].float() - before[each]).flatten() for each in before])
    assert float((found_steps - steps).norm() / steps.norm()) < UPDATES.relative


@matrix(["fsdp", "gemini", "hybrid-dp2"], name=["ddp", "fsdp", "zero1", "gemini", "hybrid-dp2"])
@on_ranks(num_ranks_of)
def test_a_lazy_model_is_trained_as_an_eager_one(name):
    eager, lazy = (trained(name, "bf16", lazily) for lazily in (False, True))
    assert moved(lazy[1], lazy[2]) >= 0.99
    for found, wanted in zip(lazy[:3], eager[:3], strict=True):
        assert_same_tensors(found, wanted, tolerance_for(torch.float32))


@matrix(["single", "ddp", "fsdp", "zero2", "gemini", "hybrid-tp2", "hybrid-pp2"], name=PLUGINS)
@on_ranks(num_ranks_of)
def test_pure_bf16_keeps_everything_in_bf16(name):
    plain = make_model(torch.bfloat16)
    plain(**batch_of(0)).loss.backward()
    booster = replace(PLUGINS[name], precision="pure-bf16").make_booster()
    model = make_model(torch.float32)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    gradients, before, after = run(booster, model, optimizer)
    wanted = {each: parameter.grad.float() for each, parameter in plain.named_parameters()}
    assert_same_tensors(gradients, wanted, tolerance_for(torch.bfloat16))
    adapter = booster.state_adapter(model)
    state = [shard for shard in adapter.optimizer_shards() if shard.global_shape]
    assert {shard.dtype for shard in (*adapter.model_shards(), *state)} == {torch.bfloat16}
    assert state
    assert not [shard for shard in adapter.optimizer_shards() if shard.state == "master"]
    assert {each.dtype for part in optimizer.gradients_in_parts() for each in part} <= {torch.bfloat16}
    assert name == "hybrid-pp2" or model(**batch_of(0)).logits.dtype == torch.bfloat16
    assert 0.0 < moved(before, after) < 0.5, "most steps are lost: that is what was asked for"
    described = booster.describe()
    assert "compute bf16, param bf16," in described
    assert "master none" in described


class Halves(nn.Module):
    """A frozen base in bf16, a trained head in fp32 and a trained scale in fp64."""

    def __init__(self, head=torch.float32):
        super().__init__()
        self.base = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, 4, dtype=head)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("table", torch.arange(8) / 3)

    def forward(self, x):
        hidden = self.base(x.to(self.base.weight.dtype)) * self.table.to(torch.bfloat16)
        return self.head(hidden.to(self.head.weight.dtype)) * self.scale.float()


@pytest.mark.parametrize("name", ["single", "ddp", "zero1", "hybrid-dp2"])
@on_ranks(num_ranks_of)
def test_models_of_one_booster_have_formats_of_their_own(name):
    booster = PLUGINS[name].make_booster()
    found, pairs = [], []
    for model in (Halves(), Halves(torch.bfloat16), nn.Linear(4, 4, dtype=torch.float64)):
        listed = [parameter for parameter in model.parameters() if parameter.requires_grad]
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(listed, lr=0.1))
        x = torch.ones(2, 4, dtype=torch.float64) if isinstance(model, nn.Linear) else torch.ones(2, 8)
        booster.backward(boosted(x).float().sum(), optimizer)
        optimizer.step()
        found.append({each: values.dtype for each, values in boosted.state_dict().items()})
        pairs.append((boosted, optimizer))
    wide, half, double = found
    assert wide["head.weight"] == torch.float32
    assert half["head.weight"] == (torch.bfloat16 if name in WITH_MASTERS else torch.float32), "the head is trained"
    for formats in (wide, half):
        assert formats["base.weight"] == torch.bfloat16
        assert formats["scale"] == torch.float64, "fp64 is no narrow format"
        assert formats["table"] == torch.float32
    assert set(double.values()) == {torch.float64}
    assert optimizer.loss_scaler is None
    described = booster.describe()  # of those that are alive
    lines = [each for each in described.splitlines() if each.startswith("precision")]
    assert len(lines) == 3
    assert "(frozen ones bf16)" in described
    assert sum("compute bf16" in each for each in lines) == 1


def test_an_explicit_policy_leaves_each_parameter_as_it_is():
    model = Halves(torch.bfloat16)
    booster = Booster("cpu", PrecisionPolicy(param_dtype=None))
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.head.parameters(), lr=0.1))
    assert boosted.head.weight.dtype == torch.bfloat16
    assert boosted(torch.ones(2, 8)).dtype == torch.float32  # promoted by the scale, without autocast
    assert "compute bf16 and fp64, param bf16 and fp64" in booster.describe()


CALLS = {
    "the model": lambda model, batch: model(batch),
    "a part": lambda model, batch: model.model(batch),
    "the own model": lambda model, batch: model.unwrap()(batch),
    "a part of the own model": lambda model, batch: model.unwrap().model(batch),
    "generate": lambda model, batch: model.generate(batch, max_new_tokens=2, do_sample=False),
    "the own generate": lambda model, batch: model.unwrap().generate(batch, max_new_tokens=2, do_sample=False),
}


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero1", "gemini", "hybrid-tp2"])
@on_ranks(num_ranks_of)
def test_parts_and_methods_compute_in_the_precision_of_the_run(name):
    """Look in which format a layer inside computes, by what is called."""
    torch.manual_seed(0)
    booster, model = replace(PLUGINS[name], precision="bf16").make_booster(), tiny_llama()
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    seen = []
    layer = model.unwrap().model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.no_grad():
        for call, function in CALLS.items():
            if name != "fsdp" or "part" not in call:  # parts that are no units of their own can't be called
                seen.clear()
                function(model.eval(), batch_of(0)["input_ids"][:2, :4] % 16)
                assert set(seen) == {torch.bfloat16}, call
    assert not torch.is_autocast_enabled("cpu")
