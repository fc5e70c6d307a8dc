"""A moving average of sharded weights equals that of one process."""

import pytest
import torch

import booster_runtime
from booster_fsdp import TorchFSDPPlugin
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import run_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.training import Training


def average_of_three_steps(training):
    booster = training.make_booster()
    model = training.make_model()
    model, optimizer, *_ = booster.boost(model, training.make_optimizer(model))
    average = booster_runtime.ema(booster, model, 0.5)
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


def test_average_equals_one_process():
    expected = run_on_ranks(average_of_three_steps, 1, Training(plugin_class=SingleDeviceStrategy))[0]
    training = Training(plugin_class=TorchFSDPPlugin, options={"unit_min_numel": 1})
    for actual in run_on_ranks(average_of_three_steps, 2, training):
        assert actual == pytest.approx(expected, rel=tolerance_for(torch.float32).relative)
