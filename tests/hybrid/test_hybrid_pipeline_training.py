"""Models that are cut into pipeline stages train, through the plugin, as one process does."""

from __future__ import annotations

import torch
from cases import Setting, assert_equals_one_process, zoo_case
from matrix import matrix, named
from model_zoo import get_model
from ranked import on_ranks

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_runtime import enable_activation_checkpointing, full_gradient
from booster_testing import run_on_ranks

LLAMA = "transformers/llama"


@matrix(["t5_generation-zbv"], name=["t5_generation", "whisper_generation"], style=["gpipe", "interleaved", "zbv"])
def test_every_schedule_trains(name, style):
    name = f"transformers/{name}"
    options = {"pp_size": 2, "pp_style": style, "example_batch": get_model(name).share(0, 0, 2)}
    assert_equals_one_process(zoo_case(name), Setting(HybridParallelPlugin, options), parts=2)


@matrix(
    ["pp2-by the model", "pp2-after boost"],
    options=named([{"pp_size": 2}, {"pp_size": 2, "tp_size": 2}], ["pp2", "tp2pp2"]),
    how=["before boost", "after boost", "by the model"],
)
@on_ranks(4)
def test_layers_may_be_recomputed(options, how):
    """Compare activation checkpointing, by Booster or by the model itself, with none."""
    zoo = get_model("transformers/llama")
    found = []
    for is_on in (False, True):
        booster = Booster(plugin=HybridParallelPlugin(**options))
        model, optimizer = zoo_case("transformers/llama").make()
        if is_on and how == "by the model":
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        if is_on and how == "before boost":
            enable_activation_checkpointing(model)
        model, optimizer, *_ = booster.boost(model, optimizer)
        if is_on and how == "after boost":
            enable_activation_checkpointing(model)
        booster.execute_pipeline(iter([zoo.share(0, 0, 4)]), model, zoo.loss, optimizer)
        found.append({n: full_gradient(booster, model, n) for n in booster.plugin.parameter_paths(model)})
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, msg=key)


def from_a_loader(steps):
    """Train from a data loader, which the dry run must not have taken anything from."""
    zoo = get_model(LLAMA)
    samples = [{key: value[0] for key, value in zoo.share(index, 0, 1).items()} for index in range(steps * 2)]
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2))
    model, optimizer = zoo_case(LLAMA).make()
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    state = torch.random.get_rng_state()
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    assert torch.equal(torch.random.get_rng_state(), state)
    batches, losses = iter(loader), []
    for _ in range(steps):
        losses.append(booster.execute_pipeline(batches, model, zoo.loss, optimizer)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert next(batches, None) is None
    return losses


def test_the_data_loader_is_the_example():
    assert len(run_on_ranks(from_a_loader, 2, 3)[1]) == 3
