"""SIGKILL of one rank or of all, at random instants of a save: what was saved before loads and is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIVES = 8


def run_script(folder, *arguments):
    command = [sys.executable, str(Path(__file__).parent / "saver_to_kill.py"), str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    """The report of kills at random instants."""
    return run_script(tmp_path_factory.mktemp("kills"), "11", str(LIVES))


def test_the_latest_step_is_always_whole(kills):
    assert len(kills["lives"]) == LIVES
    assert [life["wrong"] for life in kills["lives"]] == [[]] * LIVES


def test_no_step_is_lost_once_its_save_has_returned(kills):
    for life in kills["lives"]:
        assert life["step"] >= life["saved"]
    steps = [life["step"] for life in kills["lives"]]
    assert steps == sorted(steps)


def test_kills_hit_saves(kills):
    assert any(life["left"] for life in kills["lives"])
    assert kills["lives"][-1]["step"] > 0


def test_the_next_save_clears_away_what_kills_have_left(kills):
    assert kills["in_the_end"] == ["latest", "step-01000000"]


def test_a_kill_before_any_file_operation_of_a_save_leaves_a_whole_step(tmp_path):
    """Random instants rarely hit the short stretch between two renames; this hits every such stretch once."""
    report = run_script(tmp_path, "each")
    assert report["exit"] == 0
    assert len(report["lives"]) > 40
    assert [life["wrong"] for life in report["lives"]] == [[]] * len(report["lives"])
    steps = [life["step"] for life in report["lives"]]
    assert steps == sorted(steps)
    assert {steps[0], steps[-1]} == {1, 2}
