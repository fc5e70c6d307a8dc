"""The README's demo: one script, in one process and on several, with the same losses."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("together", "in_bf16")]


@pytest.fixture(scope="module")
def demo(run_example, scripts, tmp_path_factory):
    """Run a small demo in a new folder; one process is a fork, which has imported what it takes.

    Return what it has written to a file, what it has printed, and the folder.
    """

    def run(steps, batch_size, *more, nproc=None):
        folder = tmp_path_factory.mktemp("demo")
        size = ["--steps", steps, "--batch-size", batch_size, "--hidden", 64, "--layers", 2, "--corpus-bytes", 300000]
        arguments = [*map(str, [*size, "--losses", "losses.json", "--out", "out", *more])]
        if nproc is None:
            done = scripts.run(EXAMPLES / "pretrain_bytes.py", [arguments], folder=folder)
            assert done.codes == [0], done.output
            output = done.output
        else:
            output = run_example("pretrain_bytes.py", *arguments, cwd=folder, nproc=nproc)
        result = json.loads((folder / "losses.json").read_text())
        return SimpleNamespace(result=result, output=output, folder=folder)

    return run


@pytest.fixture(scope="module")
def alone(demo):
    return demo(20, 8)


@pytest.fixture(scope="module")
def together(demo):
    return demo(20, 4, nproc=2)


@pytest.fixture(scope="module")
def in_bf16(demo):
    return demo(5, 4, "--precision", "bf16")


def test_training_reduces_the_loss(alone):
    assert alone.result["losses"][-1] < alone.result["losses"][0] - 1


@pytest.mark.slow
def test_one_and_two_processes_have_the_same_losses(alone, together):
    # fp32 sums in another order, over 20 steps of Adam, which divides by small second moments.
    assert together.result["losses"] == pytest.approx(alone.result["losses"], rel=2e-4)
    assert together.result["losses"][0] == pytest.approx(alone.result["losses"][0], rel=1e-6)


@pytest.mark.parametrize("name", ["alone", *MORE])
def test_transformers_loads_the_saved_model(name, request):
    from transformers import AutoModelForCausalLM

    run = request.getfixturevalue(name)
    model, report = AutoModelForCausalLM.from_pretrained(run.folder / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("name", ["alone", *MORE])
def test_output_reports_the_loss_and_continues_a_text(name, request):
    run = request.getfixturevalue(name)
    assert f"validation loss {run.result['validation']:.3f}" in run.output
    before, _, text = run.output.partition("the model continues 'def ':\n")
    assert "saved the model to out, and its loss curve to out/loss.png" in before
    assert text.startswith("def ")
    assert len(text) > len("def ") + 20
