"""Meters tell what a step got out of the hardware, and change nothing of it."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_tools.flops import MORE_FORMULAS
from booster_tools.tracking import (
    JsonLines,
    Throughput,
    read_json_lines,
    throughput,
    track,
)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.first, self.second = torch.nn.Linear(8, 32), torch.nn.Linear(32, 4)

    def forward(self, tokens):
        return self.second(torch.relu(self.first(self.embedding(tokens))))


def boosted(model):
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    return booster, model, optimizer


def train(booster, model, optimizer, batches):
    for tokens in batches:
        booster.backward(model(tokens).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def slow_loader():
    for samples in (2, 2, 4):
        time.sleep(0.02)
        yield torch.zeros(samples, 6, dtype=torch.long)


@pytest.mark.parametrize("frozen", [False, True])
def test_rates_are_those_of_arithmetic(frozen, tmp_path):
    net = Net()
    net.embedding.requires_grad_(requires_grad=False)
    net.first.requires_grad_(requires_grad=not frozen)
    booster, model, optimizer = boosted(net)
    meter = Throughput(booster, model, peak_flops=1e12)
    with track(optimizer, JsonLines(tmp_path / "a.jsonl"), meters=[meter]):
        train(booster, model, optimizer, meter.batches(slow_loader()))
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
        train(booster, model, optimizer, [torch.arange(12).view(2, 6)])
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
