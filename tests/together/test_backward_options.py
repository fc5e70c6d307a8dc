"""`booster.backward` with ``retain_graph`` and ``inputs``: gradients are one process's, or the plugin refuses."""

import contextlib

import pytest
import torch
from named_plugins import NAMES, make_model, plugin_named
from ranked import on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

MORE = {"zero2": (LowLevelZeroPlugin, {"stage": 2}), "zero3": (HybridParallelPlugin, {"zero_stage": 3})}
CHOSEN = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
KINDS = ["twice", "some", "embeddings", "both", "all"]
IDS = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))


def make_booster(name, precision=None):
    if name in MORE:
        plugin_class, options = MORE[name]
        return Booster("cpu", precision, plugin_class(**options))
    return Booster("cpu", precision, plugin_named(name))


def embeddings_of(index, width):
    return torch.randn(4, 6, width, generator=torch.Generator().manual_seed(index)).requires_grad_()


def inputs_of(kind, model, embeddings):
    named = dict(model.named_parameters())
    chosen = [named[name] for name in CHOSEN]
    return {
        "some": chosen,
        "embeddings": embeddings,
        "both": [embeddings, named["model.norm.weight"]],
        "all": list(named.values()),
    }[kind]


def expected_gradients(kind, replicas):
    """Return one process's gradients of the mean loss, by name, and of each replica's embeddings."""
    model = make_model()
    of_embeddings = []
    for index in range(replicas):
        embeddings = embeddings_of(index, model.config.hidden_size)
        loss = model(inputs_embeds=embeddings, labels=IDS).loss
        if kind == "twice":
            ((loss + loss * loss) / replicas).backward()
        else:
            loss.backward(inputs=inputs_of(kind, model, embeddings))
        of_embeddings.append(embeddings.grad)
    if kind != "twice":
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / replicas
    return {name: parameter.grad for name, parameter in model.named_parameters()}, of_embeddings


def run_backward(booster, model, optimizer, kind, embeddings):
    loss = model(inputs_embeds=embeddings, labels=IDS).loss
    if kind == "twice":
        square = loss * loss
        booster.backward(loss, optimizer, retain_graph=True)
        booster.backward(square, optimizer)
    else:
        booster.backward(loss, optimizer, inputs=inputs_of(kind, model, embeddings))


def gradients(name, kinds, holds):
    """Return gradients by name and of embeddings for each kind, and whether the next step changes what has gradients.

    A whole step goes first, so that strategies have seen all parameters.
    """
    inner = make_model()
    booster = make_booster(name)
    model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=0.0))
    index, replicas = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    names = [path for path, _ in make_model().named_parameters()]
    found = []
    for kind in [None, *kinds]:
        embeddings = embeddings_of(index, model.config.hidden_size)
        if kind is None:
            booster.backward(model(inputs_embeds=embeddings, labels=IDS).loss, optimizer)
        else:
            with booster.no_sync(model, optimizer) if holds else contextlib.nullcontext():
                run_backward(booster, model, optimizer, kind, embeddings)
            found.append(({path: full_gradient(booster, model, path) for path in names}, embeddings.grad))
        optimizer.step()
        optimizer.zero_grad()
    return index, replicas, found


def check_gradients(name, kinds, holds=False):
    for index, replicas, found in run_on_ranks(gradients, 1 if name == "single" else 2, name, kinds, holds):
        for kind, (named, of_embeddings) in zip(kinds, found, strict=True):
            expected, each = expected_gradients(kind, replicas)
            for path, gradient in expected.items():
                actual = named[path]
                if gradient is None:
                    assert actual is None or not actual.any(), (kind, path)
                else:
                    torch.testing.assert_close(actual, gradient, rtol=1e-5, atol=1e-6, msg=f"{kind}: {path}")
            if kind in ("embeddings", "both"):
                torch.testing.assert_close(of_embeddings, each[index], rtol=1e-5, atol=1e-6)
            elif kind != "twice":
                assert of_embeddings is None


TAKE_ALL = ["single", "zero", "zero2", "zero3", "gemini", "hybrid", "hybrid-tp"]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in ("zero", "hybrid") else ()) for each in TAKE_ALL]
)
def test_gradients_go_to_the_inputs_only_and_graphs_can_be_kept(name):
    check_gradients(name, KINDS)


def test_every_plugin_is_looked_at():
    assert {*TAKE_ALL, "ddp", "fsdp", "hybrid-pp"} == {*NAMES, *MORE}


def test_ddp_averages_some_inputs_under_no_sync_and_all_or_none_outside():
    check_gradients("ddp", ["twice", "embeddings", "all"])
    check_gradients("ddp", KINDS, holds=True)


def test_fsdp_takes_inputs_that_are_no_parameters():
    check_gradients("fsdp", ["twice", "embeddings"])


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("ddp", "some", r"`inputs` has 3 of the \d+ parameters that DDP averages together.*`booster\.no_sync`"),
        ("ddp", "both", r"`inputs` has 1 of the \d+ parameters that DDP averages together.*`booster\.no_sync`"),
        ("fsdp", "some", r"`inputs` has 3 parameters of the model.*FSDP computes with gathered copies"),
        ("fsdp", "all", r"`inputs` has \d+ parameters of the model.*FSDP computes with gathered copies"),
    ],
)
@on_ranks(2)
def test_inputs_that_a_plugin_cannot_honour_raise_and_training_goes_on(name, kind, match):
    inner = make_model()
    booster = make_booster(name)
    model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=0.0))
    index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    for _ in range(2):
        embeddings = embeddings_of(index, model.config.hidden_size)
        loss = model(inputs_embeds=embeddings, labels=IDS).loss
        with pytest.raises(ConfigError, match=match):
            booster.backward(loss, optimizer, inputs=inputs_of(kind, model, embeddings))
        assert all(full_gradient(booster, model, path) is None for path in CHOSEN)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


SCALED = {"single": (), "fsdp": (), "zero": (), **dict.fromkeys(("ddp", "gemini", "hybrid-tp"), pytest.mark.slow)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in SCALED.items()])
@on_ranks(lambda name: 1 if name == "single" else 2)
def test_inputs_that_would_keep_a_loss_scale_raise(name):
    inner = make_model()
    booster = make_booster(name, "fp16")
    model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=0.0))
    embeddings = embeddings_of(0, model.config.hidden_size)
    loss = model(inputs_embeds=embeddings, labels=IDS).loss
    with pytest.raises(ConfigError, match=r"`inputs` has 1 tensor\(s\) that the optimizer does not step.*loss scale"):
        booster.backward(loss, optimizer, inputs=embeddings)
    if name != "fsdp":
        booster.backward(loss, optimizer, inputs=tuple(model.parameters()))
        assert full_gradient(booster, model, CHOSEN[0]).any()


def test_other_options_raise():
    booster, model = Booster("cpu"), torch.nn.Linear(2, 1)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(TypeError, match=r"takes no `create_graph` or `gradient`\. Its options are `inputs` and"):
        booster.backward(loss, optimizer, create_graph=True, gradient=None, retain_graph=True)
    assert model.weight.grad is None
