"""Saved here, loaded there: FSDP in its variants, ZeRO, DDP and one process, at one to four ranks."""

from __future__ import annotations

import pytest
import torch

from booster_core.plugin.single import SingleDevicePlugin
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.conformance_runs import load_and_train, train_and_save
from booster_testing.training import Training
from booster_zero import LowLevelZeroPlugin

RUNS = {
    "fsdp x4": (TorchFSDPPlugin, {"unit_min_numel": 1}, 4),
    "fsdp x3": (TorchFSDPPlugin, {}, 3),
    "fsdp x1": (TorchFSDPPlugin, {"unit_min_numel": 1}, 1),
    "hybrid x4": (TorchFSDPPlugin, {"replica_size": 2, "ignored_modules": ["LayerNorm"]}, 4),
    "whole x2": (TorchFSDPPlugin, {"partition": "parameter"}, 2),
    "zero2 x2": (LowLevelZeroPlugin, {"stage": 2, "bucket_bytes": 256}, 2),
    "ddp x1": (TorchDDPPlugin, {}, 1),
    "ddp x3": (TorchDDPPlugin, {}, 3),
    "single": (SingleDevicePlugin, {}, 1),
}
OTHERS = {"zero2 x2", "ddp x1", "ddp x3", "single"}
PAIRS = [(saved, loaded) for saved in RUNS for loaded in RUNS if not {saved, loaded} <= OTHERS]


def run(function, name, *args, **changes):
    plugin_class, options, world_size = RUNS[name]
    training = Training(plugin_class=plugin_class, options=options, **changes)
    per_rank = run_on_ranks(function, world_size, training, *args)
    return [sum(losses) / len(losses) for losses in zip(*per_rank, strict=True)]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_run_goes_on_under_another_plugin_and_number_of_ranks(saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), True)
    assert run(load_and_train, loaded, str(tmp_path)) == pytest.approx(
        expected, rel=tolerance_for(torch.float32).relative
    )


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize(("saved", "loaded"), [("fsdp x4", "zero2 x2"), ("ddp x3", "fsdp x4"), ("hybrid x4", "single")])
def test_matrix_optimizers_go_on_too(optimizer, saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), False, optimizer=optimizer)
    actual = run(load_and_train, loaded, str(tmp_path), optimizer=optimizer)
    assert actual == pytest.approx(expected, rel=tolerance_for(torch.float32).relative)


@pytest.mark.parametrize(("saved", "loaded"), [("zero2 x2", "fsdp x4"), ("fsdp x4", "zero2 x2"), ("fsdp x3", "ddp x1")])
def test_low_precision_runs_go_on_from_masters(saved, loaded, tmp_path):
    expected = run(train_and_save, saved, str(tmp_path), True, precision="bf16")
    actual = run(load_and_train, loaded, str(tmp_path), precision="bf16")
    assert actual == pytest.approx(expected, rel=tolerance_for(torch.bfloat16).relative)


def saved_groups(training, folder):
    booster = training.make_booster()
    model = training.make_model()
    model, optimizer, *_ = booster.boost(model, training.make_optimizer(model))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    booster.save_optimizer(optimizer, f"{folder}/o", shard=True)


def loaded_groups(training, folder):
    booster = training.make_booster()
    model = training.make_model()
    model, optimizer, *_ = booster.boost(model, training.make_optimizer(model))
    booster.load_optimizer(optimizer, f"{folder}/o")
    groups = booster.state_adapter(model, optimizer).param_groups()
    return [(group.params, group.options["lr"], group.options["weight_decay"]) for group in groups]


@pytest.mark.parametrize("loaded", ["zero2 x2", "ddp x1", "ddp x3", "single", "fsdp x3"])
def test_groups_keep_their_learning_rate_and_weight_decay(loaded, tmp_path):
    plugin_class, options, world_size = RUNS["fsdp x4"]
    run_on_ranks(saved_groups, world_size, Training(plugin_class=plugin_class, options=options), str(tmp_path))
    plugin_class, options, world_size = RUNS[loaded]
    training = Training(plugin_class=plugin_class, options=options)
    for groups in run_on_ranks(loaded_groups, world_size, training, str(tmp_path)):
        assert [group[1:] for group in groups] == [(0.005, 0.1), (0.01, 0.0)]
        assert "embedding.weight" in groups[0][0]
        assert "norm.bias" in groups[1][0]


def average_of_three_steps(training):
    booster = training.make_booster()
    model = training.make_model()
    model, optimizer, *_ = booster.boost(model, training.make_optimizer(model))
    average = booster.ema(model, 0.5)
    for step in range(3):
        tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))
        booster.backward(model(tokens).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    with torch.no_grad():
        with average.applied():
            applied = float(model(tokens).square().mean())
        return applied, float(model(tokens).square().mean())


def test_an_average_of_the_weights_is_that_of_one_process():
    expected = run_on_ranks(average_of_three_steps, 1, Training(plugin_class=SingleDevicePlugin))[0]
    training = Training(plugin_class=TorchFSDPPlugin, options={"unit_min_numel": 1})
    for actual in run_on_ranks(average_of_three_steps, 2, training):
        assert actual == pytest.approx(expected, rel=tolerance_for(torch.float32).relative)
