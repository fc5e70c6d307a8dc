from __future__ import annotations

import pytest
from click.testing import CliRunner

from booster_runtime.cli.doctor import command, run_checks


def run(*arguments):
    return CliRunner().invoke(command, arguments)


def test_doctor_finds_a_healthy_machine_healthy():
    result = run("--backend", "gloo")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    for name in ("all_reduce float32", "all_gather bfloat16", "isend_irecv bfloat16", "write one file together"):
        assert f"  ok    {name}\n" in result.output


def test_doctor_ends_what_hangs_and_names_it():
    problems = run_checks("gloo", timeout_seconds=0.01)
    assert list(problems) == ["start"] or any("did not return within 0.01 s" in str(text) for text in problems.values())
    assert any(problems.values())


def test_doctor_fails_where_a_backend_is_missing():
    import torch.distributed as dist

    if dist.is_nccl_available():
        pytest.skip("this torch has nccl, whose absence is what is tested")
    result = run("--backend", "nccl")
    assert result.exit_code == 1
    assert "FAIL" in result.output
