"""`track` hands each step's metrics and the loop's values to trackers."""

import json
import logging
import math
import re
import time
from unittest import mock

import pytest
import torch
from reference_plugins import ReferencePlugin

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_testing import run_on_ranks
from booster_tools.tracking import (
    JsonLines,
    MLflow,
    Stragglers,
    TensorBoard,
    Tracker,
    Trackio,
    WeightsAndBiases,
    read_json_lines,
    track,
)


def boosted(**settings):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    booster = Booster("cpu", **settings)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def train(booster, model, optimizer, run, steps, clip=False):
    for _ in range(steps):
        loss = model(torch.ones(3, 2)).square().mean()
        booster.backward(loss, optimizer)
        if clip:
            optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)


def test_each_step_has_a_line_with_its_metrics(tmp_path):
    booster, model, optimizer = boosted()
    path = tmp_path / "run" / "metrics.jsonl"
    with track(optimizer, JsonLines(path)) as run:
        run.log(evaluation=4)
        train(booster, model, optimizer, run, 2, clip=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"step": 0, "evaluation": 4.0}
    assert [row["step"] for row in rows[1:]] == [1, 2]
    assert all(row.keys() == {"step", "seconds", "lr", "grad_norm", "loss"} for row in rows[1:])
    assert all(row["lr"] == 0.5 and row["seconds"] > 0 and row["grad_norm"] > 0 for row in rows[1:])


def test_loss_scale_and_skipped_steps_are_tracked(tmp_path):
    booster, model, optimizer = boosted(mixed_precision="fp16")
    with track(optimizer, JsonLines(tmp_path / "a.jsonl")) as run:
        train(booster, model, optimizer, run, 1)
    (row,) = read_json_lines(tmp_path / "a.jsonl")
    assert row["loss_scale"] > 0
    assert row["skipped"] in (0.0, 1.0)


def test_steps_of_another_optimizer_do_not_count(tmp_path):
    _, _, tracked = boosted()
    booster, model, other = boosted()
    with track(tracked, JsonLines(tmp_path / "a.jsonl")) as run:
        train(booster, model, other, run, 2)
        assert run.step == 0


def test_resumed_run_goes_on_and_keeps_what_it_replaces(tmp_path):
    booster, model, optimizer = boosted()
    path = tmp_path / "a.jsonl"
    with track(optimizer, JsonLines(path)) as run:
        train(booster, model, optimizer, run, 3)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # a kill while writing
    with track(optimizer, JsonLines(path), step=2) as run:
        train(booster, model, optimizer, run, 2)
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3, 4]
    assert [row["step"] for row in read_json_lines(f"{path}.dropped")] == [3]


def test_nothing_is_kept_where_a_resumed_run_replaces_nothing(tmp_path):
    booster, model, optimizer = boosted()
    for step in (0, 2):
        with track(optimizer, JsonLines(tmp_path / "a.jsonl"), step=step) as run:
            train(booster, model, optimizer, run, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_values_are_those_of_the_moment_they_were_logged_and_need_not_be_finite(tmp_path):
    _, _, optimizer = boosted()
    value = torch.tensor(1.0)
    with track(optimizer, JsonLines(tmp_path / "a.jsonl")) as run:
        run.log(a=math.nan, b=math.inf, c=-math.inf, value=value)
        value.fill_(2.0)
    json.loads((tmp_path / "a.jsonl").read_text(), parse_constant=pytest.fail)
    (row,) = read_json_lines(tmp_path / "a.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["value"]) == (math.inf, -math.inf, 1.0)


def test_groups_have_learning_rates_of_their_own(tmp_path):
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(groups, lr=1.0))
    with track(optimizer, JsonLines(tmp_path / "a.jsonl")) as run:
        train(booster, model, optimizer, run, 1)
    (row,) = read_json_lines(tmp_path / "a.jsonl")
    assert (row["lr/0"], row["lr/1"]) == (0.5, 0.25)


class Failing(Tracker):
    def start(self, step):
        msg = "no network"
        raise OSError(msg)

    def log(self, step, values):
        pytest.fail("it did not start")

    def close(self):
        pass


def test_trackers_are_closed_where_one_does_not_start(tmp_path):
    booster, model, optimizer = boosted()
    first = JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(OSError, match="no network"), track(optimizer, first, Failing()):
        pass
    with track(optimizer, JsonLines(tmp_path / "b.jsonl")) as run:  # no hooks are left behind
        train(booster, model, optimizer, run, 1)
    assert read_json_lines(tmp_path / "a.jsonl") == []


@pytest.mark.parametrize(
    ("tracker", "package"),
    [
        (TensorBoard("runs"), "torch.utils.tensorboard"),
        (WeightsAndBiases(), "wandb"),
        (MLflow(), "mlflow"),
        (Trackio(), "trackio"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_missing_package_is_named(tracker, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    _, _, optimizer = boosted()
    with pytest.raises(ConfigError, match="pip install"), track(optimizer, tracker):
        pass


def test_bad_arguments_raise(tmp_path):
    _, _, optimizer = boosted()
    with pytest.raises(TypeError, match=r"Booster\.boost"):
        track(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    with pytest.raises(TypeError, match="JsonLines"):
        track(optimizer, "metrics.jsonl")
    with pytest.raises(ConfigError, match="step=-1"):
        track(optimizer, step=-1)
    with track(optimizer, JsonLines(tmp_path / "a.jsonl")) as run:
        with pytest.raises(ConfigError, match="seconds"):
            run.log(seconds=1.0)
        with pytest.raises(TypeError, match="loss"):
            run.log(loss=torch.ones(2))
    with pytest.raises(ConfigError, match="with track"):
        run.log(loss=1.0)  # the block has ended
    with pytest.raises(ConfigError, match="Pass it to `track`"):
        JsonLines(tmp_path / "c.jsonl").log(1, {"loss": 1.0})
    (tmp_path / "b.jsonl").write_text("loss 4\n")
    with pytest.raises(ConfigError, match="Line 1"):
        read_json_lines(tmp_path / "b.jsonl")


class _Slow(torch.nn.Module):
    """A block that takes long on rank 1."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(0.05 if torch.distributed.get_rank() == 1 else 0.005)
        return self.inner(x)


def measured(path):
    model = torch.nn.Sequential(_Slow(), _Slow())
    booster = Booster("cpu", plugin=ReferencePlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    warnings = []
    with (
        mock.patch.object(logging.getLogger("booster"), "warning", lambda _, *named: warnings.extend(named)),
        track(optimizer, JsonLines(path), meters=[Stragglers(booster, model, every=2)]) as run,
    ):
        for _ in range(5):
            inputs = torch.full((2, 4), float(torch.distributed.get_rank()))
            booster.backward(model(inputs).mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            run.log(done=1)
    hooks = [len(module._forward_hooks) for module in booster.unwrap(model)]
    return warnings, hooks


def test_a_slow_rank_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for warnings, hooks in run_on_ranks(measured, 2, path):
        assert hooks == [0, 0]
        assert len(warnings) == 2
        assert all(re.match(r"rank 1 on \S+ \(1\.\d\d\)$", named) for named in warnings)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    compared = [row["step"] for row in rows if "slowest_rank" in row]
    assert compared == [2, 4]
    assert all(row["slowest_rank"] == 1.0 for row in rows if "slowest_rank" in row)
    assert all(row["forward_seconds_max"] >= 0.1 for row in rows if "slowest_rank" in row)


@pytest.mark.parametrize("options", [{"every": 0}, {"threshold": 1.0}])
def test_settings_of_stragglers(options):
    booster, model, _ = boosted()
    with pytest.raises(ConfigError, match="must be 1 or more, and"):
        Stragglers(booster, model, by=torch.nn.Linear, **options)
