from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from resumable import ResumableRun

from booster_core.cli import main

MODEL = "model/model-00001-of-00001.safetensors"
OPTIMIZER = "optimizer/optimizer-00001-of-00001.safetensors"


def run(*arguments):
    return CliRunner().invoke(main, ["inspect", "--check", *map(str, arguments)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    training = ResumableRun()
    for step in (3, 6):
        training.train(step)
        training.save(folder)
    return folder


@pytest.fixture
def root(saved, tmp_path):
    """A copy of a root with two steps, to be damaged."""
    shutil.copytree(saved, tmp_path / "root")
    return tmp_path / "root"


def flip(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("path", ["", "step-00000006", "step-00000006/model", "step-00000006/optimizer"])
def test_what_is_whole_passes(path, root):
    result = run(root / path)
    assert result.exit_code == 0, result.output
    assert "whole (checked sizes and checksums" in result.output


def test_without_a_manifest_it_says_what_it_could_not_check(root, tmp_path):
    shutil.copytree(root / "step-00000006" / "model", tmp_path / "model")
    result = run(tmp_path / "model")
    assert result.exit_code == 0
    assert "there is no manifest with checksums" in result.output


@pytest.mark.parametrize(
    "name",
    [
        MODEL,
        OPTIMIZER,
        "model/model.safetensors.index.json",
        "optimizer/param_groups.json",
        "training_state.json",
        "training_state.safetensors",
    ],
)
def test_a_flipped_bit_in_any_file_is_named(name, root):
    flip(root / "step-00000006" / name)
    for path in (root, root / "step-00000006"):
        result = run(path)
        assert result.exit_code == 1
        assert f"'{name}' has the checksum" in result.output


def test_a_flipped_bit_is_found_from_below_the_manifest_too(root):
    flip(root / "step-00000006" / MODEL)
    assert f"'{MODEL}' has the checksum" in run(root / "step-00000006" / "model").output
    assert run(root / "step-00000006" / "optimizer").exit_code == 0


def test_a_truncated_file_is_named(root):
    path = root / "step-00000006" / MODEL
    path.write_bytes(path.read_bytes()[:-10])
    result = run(root / "step-00000006")
    assert result.exit_code == 1
    assert f"'{MODEL}' has " in result.output
    assert "and was saved with" in result.output


def test_a_missing_file_is_named(root):
    (root / "step-00000006" / MODEL).unlink()
    assert f"'{MODEL}' cannot be found" in run(root / "step-00000006").output


@pytest.mark.parametrize("cut", [0, 10, -3])
def test_a_truncated_manifest_is_named(cut, root):
    path = root / "step-00000006" / "manifest.json"
    path.write_bytes(path.read_bytes()[:cut])
    result = run(root / "step-00000006")
    assert result.exit_code == 1
    assert "manifest.json" in result.output


def test_a_manifest_that_was_edited_is_noticed(root):
    path = root / "step-00000006" / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][MODEL]["nbytes"] += 1
    path.write_text(json.dumps(content))
    assert "not what its own checksum says" in run(root / "step-00000006").output


def test_an_index_that_lies_is_noticed(root, tmp_path):
    shutil.copytree(root / "step-00000006" / "model", tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["third.weight"] = content["weight_map"].pop("first.weight")
    index.write_text(json.dumps(content))
    result = run(tmp_path / "model")
    assert result.exit_code == 1
    assert "'third.weight'" in result.output


def test_a_root_whose_latest_step_is_gone_names_the_one_to_load(root):
    shutil.rmtree(root / "step-00000006")
    result = run(root)
    assert result.exit_code == 1
    assert "load it with `step=3`" in result.output


def test_a_path_that_holds_nothing_fails(tmp_path):
    result = run(tmp_path / "none")
    assert result.exit_code == 1
    assert "There is no model checkpoint" in result.output
