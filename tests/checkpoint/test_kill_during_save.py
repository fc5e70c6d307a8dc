"""SIGKILL before each file operation of a save: what was saved before loads and is whole, or what is saved now."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_script(root, *arguments):
    command = [sys.executable, str(Path(__file__).parent / "saver_to_kill.py"), str(root), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=env)
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["exit"] == 0
    return report["lives"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "prefix"),
    [
        pytest.param("each", "", id="path"),
        pytest.param("async", "", id="background", marks=SLOW),
        pytest.param("each", "local://", id="url", marks=SLOW),
    ],
)
def test_a_kill_before_any_file_operation_of_a_save_leaves_a_whole_step(how, prefix, tmp_path):
    """Random instants rarely hit the short stretch between two renames; this hits every such stretch once."""
    if prefix:
        pytest.importorskip("fsspec", reason="URLs need the extra 'storage'")
    lives = run_script(tmp_path / "root", how, prefix)
    assert len(lives) > 25
    assert [life["wrong"] for life in lives] == [[]] * len(lives)
    steps = [life["step"] for life in lives]
    assert steps == sorted(steps)
    assert {steps[0], steps[-1]} == {1, 2}


@SLOW
def test_a_kill_while_a_folder_of_torchs_is_replaced_leaves_the_old_or_the_new_one(tmp_path):
    lives = run_script(tmp_path / "root", "dcp")
    values = [life["values"] for life in lives]
    assert len(values) > 10
    assert values == sorted(values)
    assert (values[0], values[-1]) == ([1.0], [2.0])
    assert {len(each) for each in values} == {1}
    for life in lives:  # what a kill left goes with the next save
        assert len(life["left"]) == 3, life["left"]
        assert {".metadata", "m"} < set(life["left"])
