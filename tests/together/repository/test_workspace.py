"""Which packages a change touches, and the workflows that run their tests."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import yaml

import workspace

ROOT = Path(__file__).parents[3]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in ROOT.glob(".github/workflows/*.yml")
}

ALL = workspace.PACKAGES


def _commands():
    for workflow in WORKFLOWS.values():
        for job in workflow["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                if "nox -s" in step.get("run", ""):
                    yield step["run"], matrix


def test_workflows_run_sessions_that_exist():
    command = [sys.executable, "-m", "nox", "--list", "-f", str(ROOT / "noxfile.py")]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # a session's line: `- NAME -> the first line of its docstring`
    sessions = set(re.findall(r"^[-*] (.+?)(?: -> .*)?$", out, re.MULTILINE))
    found = []
    for template, matrix in _commands():
        for command in _filled(template, matrix):
            text = command.partition("nox -s ")[2].partition(" -- ")[0].strip()
            names = [text.strip('"')] if text.startswith('"') else text.split()
            assert set(names) <= sessions
            found += names
    assert {"package(all, core=newest)", "pages", "device", "coverage"} <= set(found)
    assert {f"package({name}, core=lowest)" for name in ALL} <= set(found)


def _filled(template, matrix):
    """Return the commands that a job's matrix makes of one; the first package stands for those of a change or a tag."""
    commands = [template]
    for key, values in matrix.items():
        commands = [
            re.sub(
                rf"\$\{{{{ matrix\.{key}(\.\w+)? }}}}",
                lambda found, value=value: str(value[found[1][1:]] if found[1] else value),
                each,
            )
            for each in commands
            for value in ([ALL[0]] if isinstance(values, str) else values)
        ]
    return [re.sub(r"\$\{\{ steps\.tag\.outputs\.package \}\}", ALL[0], each) for each in dict.fromkeys(commands)]


def test_the_check_of_a_protected_branch_needs_every_job():
    jobs = WORKFLOWS["ci"]["jobs"]
    assert {*jobs["passed"]["needs"], "passed"} == set(jobs)


def test_slow_jobs_have_each_test_file_once():
    named = [  # the shell expands patterns
        path
        for group in WORKFLOWS["ci"]["jobs"]["slow"]["strategy"]["matrix"]["folders"]
        for pattern in group.split()
        for path in ROOT.glob(pattern)
    ]
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert [each in (path, *path.parents) for each in named].count(True) == 1, path


def test_no_test_that_alone_finds_a_fault_is_left_to_the_long_ones():
    spec = importlib.util.spec_from_file_location("long_tests", ROOT / "tests" / "evidence" / "long_tests.py")
    long_tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(long_tests)
    assert not [each for each in long_tests.finders() if long_tests.is_long(each)]
    for test in long_tests.listed():
        path, *_, name = test.partition("[")[0].split("::")
        assert (ROOT / path).exists(), test
        if name.startswith("test_") and "::Test" not in test:  # else a kit's, which the class inherits
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test
