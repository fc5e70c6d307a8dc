from __future__ import annotations

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from resumable import ResumableRun

from booster_core.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root with two steps."""
    folder = tmp_path_factory.mktemp("root")
    training = ResumableRun()
    for step in (3, 6):
        training.train(step)
        training.save(folder, extra={"best": 0.5})
    return folder


@pytest.fixture
def model(tmp_path):
    """A Booster and a model with two tensors, to be saved in ``tmp_path``."""
    return ResumableRun().booster, torch.nn.Linear(3, 5).bfloat16()


def test_a_training_state_shows_what_wrote_it_and_its_tensors(root):
    result = run("inspect", root / "step-00000006")
    assert result.exit_code == 0, result.output
    for text in ("training state", "step: 6", "torch", "CosineAnnealingLR", "extra: best", "random states: of 1 rank"):
        assert text in result.output
    lines = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.strip()}
    file = "model/model-00001-of-00001.safetensors"
    assert lines["first.weight"] == ["float32", "32x8", "1,024", file]
    assert lines["seen"] == ["int64", "scalar", "8", file]
    assert lines["first.weight/exp_avg"][:3] == ["float32", "32x8", "1,024"]
    assert result.output.splitlines()[-1].startswith("17 tensors, ")


def test_a_root_lists_its_steps(root):
    result = run("inspect", root)
    assert result.exit_code == 0
    assert "latest: step-00000006" in result.output
    assert "step-00000003: " in result.output


@pytest.mark.parametrize("spoil", [lambda content: content[:40], lambda content: content.replace(b"3", b"4")])
def test_a_root_goes_on_after_a_damaged_manifest(spoil, root, tmp_path):
    shutil.copytree(root, tmp_path / "root")
    manifest = tmp_path / "root" / "step-00000003" / "manifest.json"
    manifest.write_bytes(spoil(manifest.read_bytes()))
    result = run("inspect", tmp_path / "root")
    assert result.exit_code == 0
    assert "step-00000003: not whole: " in result.output
    assert "step-00000006: 1" in result.output or "step-00000006: 2" in result.output
    assert run("inspect", "--check", tmp_path / "root").exit_code == 1


def test_json_holds_the_same(root):
    found = json.loads(run("inspect", "--json", root / "step-00000006" / "model").output)
    assert found["kind"] == "model"
    assert {row["name"]: row["shape"] for row in found["tensors"]}["second.weight"] == [4, 32]


def test_the_optimizers_folder_shows_its_groups(root):
    result = run("inspect", root / "step-00000003" / "optimizer")
    assert "optimizer" in result.output.splitlines()[0]
    assert "parameter groups: 4 parameters, " in result.output
    assert "weight_decay=0.01" in result.output


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one.safetensors", {}),
        ("one.bin", {"use_safetensors": False}),
        ("folder", {"shard": True}),
        ("folder", {"shard": True, "use_safetensors": False}),
        ("dcp", {"gather_dtensor": False}),
    ],
)
def test_every_form_of_a_model(name, options, model, tmp_path):
    booster, module = model
    booster.save_model(module, tmp_path / name, **options)
    result = run("inspect", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert "weight  bfloat16  5x3" in result.output
    assert "2 tensors, 40 bytes, 1 files" in result.output


def test_no_values_are_read(root, tmp_path):
    shutil.copytree(root / "step-00000006" / "model", tmp_path / "model")
    file = next((tmp_path / "model").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-100:] = b"\xff" * 100
    file.write_bytes(content)
    assert run("inspect", tmp_path / "model").output.count("float32") == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "There is no model checkpoint at"),
        (lambda path: path.mkdir(), "holds no model checkpoint"),
        (lambda path: path.write_bytes(b"short"), "too few for a safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 100), "announces a header of"),
    ],
    ids=["absent", "empty", "short", "garbage"],
)
def test_what_is_no_checkpoint_is_an_error(make, message, tmp_path):
    make(tmp_path / "it")
    result = run("inspect", tmp_path / "it")
    assert result.exit_code == 1
    assert message in result.output


# ---- whether it is whole; what damage it names is in `test_training_faults`


def check(path):
    result = run("inspect", "--check", path)
    return result.exit_code, result.output


def test_what_is_whole_passes_and_it_says_what_it_could_not_check(root, tmp_path):
    for path in ("", "step-00000006", "step-00000006/model", "step-00000006/optimizer"):
        code, output = check(root / path)
        assert code == 0, output
        assert "whole (checked sizes and checksums" in output
    shutil.copytree(root / "step-00000006" / "model", tmp_path / "model")
    assert "there is no manifest with checksums" in check(tmp_path / "model")[1]
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("first.weight", "third.weight"))
    code, output = check(tmp_path / "model")
    assert code == 1
    assert "'third.weight'" in output
    assert "There is no model checkpoint" in check(tmp_path / "none")[1]
