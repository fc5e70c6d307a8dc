"""`track` hands each step's metrics, the loop's values and what meters measure to trackers, and changes nothing."""

import json
import logging
import math
import re
import time
from unittest import mock

import pytest
import torch
from ranked import on_ranks
from reference_plugins import ReferencePlugin
from torch.utils.flop_counter import FlopCounterMode

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_tools.flops import MORE_FORMULAS
from booster_tools.tracking import (
    JsonLines,
    MLflow,
    Stragglers,
    TensorBoard,
    Throughput,
    Tracker,
    Trackio,
    WeightsAndBiases,
    read_json_lines,
    throughput,
    track,
)


def boosted(model=None, **settings):
    model = model or torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
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


def test_trackers_are_closed_where_one_does_not_start(tmp_path):
    booster, model, optimizer = boosted()
    first, failing = JsonLines(tmp_path / "a.jsonl"), mock.create_autospec(Tracker, instance=True)
    failing.start.side_effect = OSError("no network")
    with pytest.raises(OSError, match="no network"), track(optimizer, first, failing):
        pass
    failing.log.assert_not_called()
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


@on_ranks(2)
def test_a_slow_rank_is_named(tmp_path):
    class Slow(torch.nn.Sequential):
        """A block that takes long on rank 1."""

        def forward(self, x):
            time.sleep(0.05 if torch.distributed.get_rank() == 1 else 0.005)
            return super().forward(x)

    model = torch.nn.Sequential(*(Slow(torch.nn.Linear(4, 4)) for _ in range(2)))
    booster = Booster("cpu", plugin=ReferencePlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    path, warnings = tmp_path / "metrics.jsonl", []
    with (
        mock.patch.object(logging.getLogger("booster"), "warning", lambda _, *named: warnings.extend(named)),
        track(optimizer, JsonLines(path), meters=[Stragglers(booster, model, every=2)]),
    ):
        train_on(booster, model, optimizer, [torch.full((2, 4), float(torch.distributed.get_rank()))] * 5)
    assert not any(module._forward_hooks for module in booster.unwrap(model))
    assert len(warnings) == 2
    assert all(re.match(r"rank 1 on \S+ \(1\.\d\d\)$", named) for named in warnings)
    booster.context.coordinator.block_all()  # rank 0 has written its file
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


# ---- what a step got out of the hardware


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.first, self.second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)

    def forward(self, tokens):
        return self.second(torch.relu(self.first(self.embedding(tokens))))


def train_on(booster, model, optimizer, batches):
    for tokens in batches:
        booster.backward(model(tokens).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("frozen", [False, True])
def test_rates_are_those_of_arithmetic(frozen, tmp_path):
    def slow_loader():
        for samples in (2, 2, 4):
            time.sleep(0.02)
            yield torch.zeros(samples, 6, dtype=torch.long)

    net = Net()
    net.embedding.requires_grad_(requires_grad=False)
    net.first.requires_grad_(requires_grad=not frozen)
    booster, model, optimizer = boosted(net)
    meter = Throughput(booster, model, peak_flops=1e12)
    with track(optimizer, JsonLines(tmp_path / "a.jsonl"), meters=[meter]):
        train_on(booster, model, optimizer, meter.batches(slow_loader()))
    trained = sum(each.numel() for each in net.parameters() if each.requires_grad)
    passes = 2 + trained / sum(each.numel() for each in net.parameters())
    rows = read_json_lines(tmp_path / "a.jsonl")
    assert len(rows) == 3
    for row, samples in zip(rows, (2, 2, 4), strict=True):
        tokens = 6 * samples
        flops = passes * 2 * tokens * (8 * 32 + 32 * 4)
        assert row["samples_per_second"] * row["seconds"] == pytest.approx(samples)
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(tokens)
        assert row["tflops_per_device"] * row["seconds"] * 1e12 == pytest.approx(flops)
        assert row["mfu"] == pytest.approx(row["tflops_per_device"])
        assert 0.02 <= row["data_seconds"] <= row["seconds"]
        assert row["peak_memory_bytes"] > 1 << 20
    assert not model._forward_pre_hooks


def test_evaluation_and_unknown_devices_have_no_rates(tmp_path):
    booster, model, optimizer = boosted(Net())
    with track(optimizer, JsonLines(tmp_path / "a.jsonl"), meters=[Throughput(booster, model)]):
        model.eval()
        model(torch.zeros(2, 6, dtype=torch.long))
        optimizer.step()
    (row,) = read_json_lines(tmp_path / "a.jsonl")
    assert row.keys() == {"step", "seconds", "lr", "peak_memory_bytes", "data_seconds"}


def test_a_known_device_has_the_peak_of_its_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    device = torch.device("cuda", 0)
    assert throughput.known_peak_flops(device, is_narrow=True) == 989e12
    assert throughput.known_peak_flops(device, is_narrow=False) == 67e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Unknown")
    assert throughput.known_peak_flops(device, is_narrow=True) is None


def test_a_loop_that_does_not_clip_may_ask_for_the_norm(tmp_path):
    torch.manual_seed(0)
    booster, model, optimizer = boosted(Net())
    with track(optimizer, JsonLines(tmp_path / "a.jsonl")):
        booster.backward(model(torch.arange(12).view(2, 6)).square().mean(), optimizer)
        norm = float(optimizer.grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        train_on(booster, model, optimizer, [torch.arange(12).view(2, 6)])
    first, second = read_json_lines(tmp_path / "a.jsonl")
    assert first["grad_norm"] == norm > 0
    assert "grad_norm" not in second


def test_what_can_not_be_measured_is_refused():
    booster, model, optimizer = boosted(Net())
    with pytest.raises(TypeError, match=r"needs the model returned by `Booster.boost`; got `Net`"):
        Throughput(booster, Net())
    with pytest.raises(ConfigError, match=r"`peak_flops=0` is no number"):
        Throughput(booster, model, peak_flops=0)
    with pytest.raises(TypeError, match="A meter is an object such as"):
        track(optimizer, meters=[JsonLines("a.jsonl")])


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch before 2.10 has none on the CPU")
def test_products_of_experts_are_counted():
    rows, experts = torch.randn(64, 32, requires_grad=True), torch.randn(4, 32, 16, requires_grad=True)
    ends = torch.tensor([16, 32, 32, 64], dtype=torch.int32)
    with FlopCounterMode(display=False, custom_mapping=MORE_FORMULAS) as counter:
        out = torch.nn.functional.grouped_mm(rows, experts, offs=ends)
        out.backward(torch.ones_like(out))
    assert counter.get_total_flops() == 3 * 2 * 64 * 32 * 16
