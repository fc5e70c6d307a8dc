import os
import re
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from ranked import on_ranks

from booster_tools.cli import doctor
from booster_tools.cli._doctor_checks import Checks
from booster_tools.cli.doctor import Finding, command, run_checks


def run(*arguments):
    return CliRunner().invoke(command, arguments)


def test_doctor_finds_a_healthy_machine_healthy():
    result = run("--backend", "gloo")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    for name in ("launch", "all_reduce float32", "all_gather bfloat16", "isend_irecv bfloat16"):
        assert f"  ok    {name}\n" in result.output
    for name, unit in (
        ("reduce-scatter", r"\d+ MB/s"),
        ("point to point, small messages", r"[\d.]+ ms"),
        ("store, meetings of all ranks", r"[\d.]+ ms"),
        ("disk, writing", r"\d+ MB/s, [\d.]+ GiB free"),
    ):
        # a machine that runs many tests at a time may be slow
        assert re.search(rf"^  (ok|slow)  +{name}: {unit}$", result.output, re.MULTILINE), result.output


@pytest.mark.parametrize("number", [0, 1, 2])
def test_doctor_names_devices_and_whether_nccl_can_be_tried(number, monkeypatch):
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda") if number else None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    asked = []
    monkeypatch.setattr(doctor, "run_checks", lambda backend, *_: asked.append(backend) or {"launch": Finding("ok")})
    output = run().output
    for index in range(number):
        assert f"cuda device {index}: NVIDIA H100 80GB HBM3, 79.2 GiB\n" in output
    assert ("no GPU or other accelerator: torch sees CPUs only\n" in output) == (number == 0)
    assert ("nccl: not tried, because it needs 2 devices, one for each process\n" in output) == (number == 1)
    assert asked == (["gloo", "nccl"] if number == 2 else ["gloo"])


def test_doctor_ends_what_hangs_and_names_it():
    findings = run_checks("gloo", timeout_seconds=0.01)
    late = any("did not return within 0.01 s" in finding.detail for finding in findings.values())
    assert list(findings) == ["start"] or late
    assert {finding.state for finding in findings.values()} >= {"FAIL"}


def test_doctor_fails_where_a_backend_is_missing():
    import torch.distributed as dist

    if dist.is_nccl_available():
        pytest.skip("this torch has nccl, whose absence is what is tested")
    result = run("--backend", "nccl")
    assert result.exit_code == 1
    assert "FAIL" in result.output


@pytest.mark.parametrize(
    ("arguments", "status"), [((), 0), (("--strict",), 1)], ids=["a note by default", "a failure if strict"]
)
def test_doctor_names_what_is_slow(arguments, status, monkeypatch):
    findings = {"launch": Finding("ok"), "the check": Finding("slow", "3 MB/s")}
    monkeypatch.setattr(doctor, "run_checks", lambda *_: findings)
    result = run("--backend", "gloo", *arguments)
    assert result.exit_code == status
    assert "  slow  the check: 3 MB/s\n" in result.output
    assert "All plugins work; what is slow costs time." in result.output


@on_ranks(2)
def test_doctor_reads_a_file_when_all_ranks_have_written_it(tmp_path):
    """Check the file of both ranks, of which one writes late, where collectives return before they are done."""
    write = os.pwrite

    def late(*arguments):
        time.sleep(0.3 * torch.distributed.get_rank())
        return write(*arguments)

    with mock.patch.object(os, "pwrite", late), mock.patch.object(torch.distributed, "all_reduce"):
        Checks(torch.device("cpu"), tmp_path).file()
