"""`booster.backward` with ``inputs``: gradients are one process's, or the plugin refuses.

`test_programs.py` keeps graphs.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from matrix import matrix
from named_plugins import make_model
from plugin_runs import RUNS, boosted
from ranked import on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import full_gradient

CHOSEN = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
INPUTS = {
    "some": lambda named, _: [named[name] for name in CHOSEN],
    "embeddings": lambda _, embeddings: embeddings,
    "both": lambda named, embeddings: [embeddings, named["model.norm.weight"]],
    "all": lambda named, _: list(named.values()),
}
IDS = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))


def ranks_of(name):
    return RUNS[name].num_ranks


def embeddings_of(index):
    return torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(index)).requires_grad_()


def loss_of(model, embeddings):
    return model(inputs_embeds=embeddings, labels=IDS).loss


def inputs_of(kind, model, embeddings):
    return INPUTS[kind](dict(model.named_parameters()), embeddings)


def check_gradients(name, kinds, holds=False):
    """Compare gradients by name and of embeddings with one process's; a whole step goes first, which shows all."""
    booster, model, optimizer = boosted(RUNS[name], make_model(), lr=0.0)
    index, replicas = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    booster.backward(loss_of(model, embeddings_of(index)), optimizer)
    for kind in kinds:
        optimizer.step()
        optimizer.zero_grad()
        embeddings = embeddings_of(index)
        with booster.no_sync(model, optimizer) if holds else contextlib.nullcontext():
            booster.backward(loss_of(model, embeddings), optimizer, inputs=inputs_of(kind, model, embeddings))
        plain, all_embeddings = make_model(), [embeddings_of(number) for number in range(replicas)]
        for each in all_embeddings:
            (loss_of(plain, each) / replicas).backward(inputs=inputs_of(kind, plain, each))
        for path, parameter in plain.named_parameters():
            actual = full_gradient(booster, model, path)
            if parameter.grad is None:
                assert actual is None or not actual.any(), (kind, path)
            else:
                torch.testing.assert_close(actual, parameter.grad, rtol=1e-5, atol=1e-6, msg=f"{kind}: {path}")
        if kind in ("embeddings", "both"):
            torch.testing.assert_close(embeddings.grad, replicas * all_embeddings[index].grad, rtol=1e-5, atol=1e-6)
        else:
            assert embeddings.grad is None


TAKE_ALL = [name for name in RUNS if name not in ("ddp", "fsdp", "hybrid-pp")]


@matrix(["single", "zero2", "zero3", "gemini", "hybrid-tp"], name=TAKE_ALL)
@on_ranks(ranks_of)
def test_gradients_go_to_the_inputs_only(name):
    check_gradients(name, [*INPUTS])


@on_ranks(2)
def test_ddp_averages_some_inputs_under_no_sync_and_all_or_none_outside():
    check_gradients("ddp", ["embeddings", "all"])
    check_gradients("ddp", [*INPUTS], holds=True)


@on_ranks(2)
def test_fsdp_takes_inputs_that_are_no_parameters():
    check_gradients("fsdp", ["embeddings"])


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
    booster, model, optimizer = boosted(RUNS[name], make_model(), lr=0.0)
    for _ in range(2):
        embeddings = embeddings_of(booster.context.coordinator.rank)
        loss = loss_of(model, embeddings)
        with pytest.raises(ConfigError, match=match):
            booster.backward(loss, optimizer, inputs=inputs_of(kind, model, embeddings))
        assert all(full_gradient(booster, model, path) is None for path in CHOSEN)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


@matrix(["single", "fsdp", "zero1"], name=["single", "ddp", "fsdp", "zero1", "gemini", "hybrid-tp"])
@on_ranks(ranks_of)
def test_inputs_that_would_keep_a_loss_scale_raise(name):
    booster, model, optimizer = boosted(replace(RUNS[name], precision="fp16"), make_model(), lr=0.0)
    embeddings = embeddings_of(0)
    loss = loss_of(model, embeddings)
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
