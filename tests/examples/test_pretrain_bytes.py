"""The README's demo: one script, in one process and on several, with the same losses."""

import json
import math

import pytest
import torch

SMALL = ["--steps", "20", "--hidden", "64", "--layers", "2", "--corpus-bytes", "300000"]


@pytest.fixture
def losses(run_example, tmp_path):
    def run(batch_size, nproc=None, *more):
        file = tmp_path / "losses.json"
        output = run_example(
            "pretrain_bytes.py", *SMALL, "--batch-size", str(batch_size), "--losses", str(file), *more, nproc=nproc
        )
        return json.loads(file.read_text()), output

    return run


def test_one_and_two_processes_see_the_same_losses(losses):
    (alone, _), (together, _) = losses(8), losses(4, 2)
    assert alone["losses"][0] == pytest.approx(math.log(256), abs=0.3)
    # fp32 sums in another order, carried through 20 steps of Adam, which divides by small second moments.
    assert together["losses"] == pytest.approx(alone["losses"], rel=2e-4)
    assert together["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)


def test_two_runs_agree_bit_for_bit(losses):
    assert losses(4, 2)[0] == losses(4, 2)[0]


def test_it_saves_what_transformers_loads(losses, tmp_path):
    from transformers import AutoModelForCausalLM

    result, output = losses(4, None, "--precision", "bf16", "--out", str(tmp_path / "out"))
    assert f"validation loss {result['validation']:.3f}" in output
    assert output.splitlines()[-1] or "def " in output
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
