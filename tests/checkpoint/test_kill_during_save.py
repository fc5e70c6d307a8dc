"""SIGKILL of one rank or of all, at random instants of a save: what was saved before loads and is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_script(folder, *arguments, timeout=400):
    command = [sys.executable, str(Path(__file__).parent / "saver_to_kill.py"), str(folder), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # two hundred lives of two ranks
def test_kills_at_random_lose_no_step_and_the_next_save_clears_away_what_they_have_left(tmp_path):
    report = run_script(tmp_path, "12", "200", timeout=3600)
    assert [life["wrong"] for life in report["lives"]] == [[]] * 200
    assert all(life["step"] >= life["saved"] for life in report["lives"])
    steps = [life["step"] for life in report["lives"]]
    assert steps == sorted(steps)
    assert sum(bool(life["left"]) for life in report["lives"]) > 20, "kills hit saves"
    assert report["in_the_end"] == ["latest", "lease.json", "step-01000000"]


@pytest.mark.parametrize("prefix", ["", pytest.param("local://", marks=pytest.mark.slow)], ids=["path", "url"])
def test_a_kill_before_any_file_operation_of_a_save_leaves_a_whole_step(prefix, tmp_path):
    """Random instants rarely hit the short stretch between two renames; this hits every such stretch once."""
    if prefix:
        pytest.importorskip("fsspec", reason="URLs need the extra 'storage'")
    report = run_script(tmp_path, "each", prefix)
    assert report["exit"] == 0
    assert len(report["lives"]) > 25
    assert [life["wrong"] for life in report["lives"]] == [[]] * len(report["lives"])
    steps = [life["step"] for life in report["lives"]]
    assert steps == sorted(steps)
    assert {steps[0], steps[-1]} == {1, 2}


@pytest.mark.slow
def test_a_kill_while_a_folder_of_torchs_is_replaced_leaves_the_old_or_the_new_one(tmp_path):
    report = run_script(tmp_path, "dcp")
    assert report["exit"] == 0
    values = [life["values"] for life in report["lives"]]
    assert len(values) > 10
    assert values == sorted(values)
    assert (values[0], values[-1]) == ([1.0], [2.0])
    assert {len(each) for each in values} == {1}
    for life in report["lives"]:  # what a kill left goes with the next save
        assert len(life["left"]) == 3, life["left"]
        assert {".metadata", "m"} < set(life["left"])
