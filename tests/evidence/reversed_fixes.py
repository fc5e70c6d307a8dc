"""Take past fixes back, one at a time, on HEAD, and write which tests find that into `finders.csv` in this folder.

A fix is a commit that changed sources and tests. First come those with a changelog fragment *fixed* or *numerics* or
that say so in their first line. The change of the sources is applied backwards in a clone of this repository, as far
as its lines are still there; then the tests that the commit added or changed run until one fails. A test that fails
without the fault as well does not count.

    python tests/evidence/reversed_fixes.py --limit 100
    python tests/evidence/reversed_fixes.py --with tests/together/test_programs.py  # do these find the listed faults?

A line of the table is a fault: the commit, the files it changed, how the fault shows, and the tests that find it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("finders.csv")
_SOURCES, _TESTS = "packages/*/src/**/*.py", "tests/**/*.py"
_SAYS_SO = re.compile(r"\b(fix|mend|correct|wrong|silent|hang|leak|no longer|lost?e?s?|not to)\w*", re.IGNORECASE)
_FRAGMENT = re.compile(r"changelog\.d/.*\.(fixed|numerics)\.md$")
_OF_CODE = re.compile(r"(ImportError|ModuleNotFoundError|AttributeError|NameError|TypeError|SyntaxError)\b")
"""What a test raises where the rest of the sources need the change that was taken back: no fault that could happen."""
_SEVERAL = " | "
_MOST_LINES = 80
"""A change of more is no single fault."""


@dataclass
class Fault:
    """A line of the table.

    Args:
        commit: The fix.
        subject: Its first line.
        sources: What it changed.
        outcome: ``found``; ``missed`` by its own tests; ``late`` if they take longer than the limit; ``unfit`` if the
            sources no longer work without it; ``untested`` if its tests are gone.
        how: The error's first line.
        finders: Tests that fail.
    """

    commit: str
    subject: str
    sources: str
    outcome: str = ""
    how: str = ""
    finders: str = ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=1_000_000, help="how many faults more, the latest fixes first")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the tests of a fault")
    parser.add_argument("--with", dest="files", nargs="+", metavar="FILE", help="run these on the table's faults")
    parser.add_argument("--of", default="", help="with `--with`: only faults whose finders match this pattern")
    parser.add_argument("--touching", default="", help="only fixes that changed tests whose path matches this pattern")
    arguments = parser.parse_args()
    known = {fault.commit: fault for fault in _read()}
    with tempfile.TemporaryDirectory(prefix="reversed-fixes-") as folder:
        tree = _Tree(Path(folder), arguments.seconds)
        if arguments.files:
            _try_files(tree, list(known.values()), arguments.files, arguments.of)
            return
        for commit in _fixes(arguments.touching):
            if commit in known or arguments.limit <= 0:
                continue
            fault = _tried(tree, commit)
            if fault is not None:
                known[commit] = fault
                arguments.limit -= fault.outcome in ("found", "missed", "late")
                _write(list(known.values()))
                print(f"{commit} {fault.outcome:9}{fault.subject[:70]}\n    {fault.finders or fault.how}", flush=True)


def _try_files(tree, faults, files, pattern):
    """Print which faults tests of these files find, and add them to the table."""
    for fault in faults:
        is_wanted = fault.outcome in ("found", "missed", "late") and re.search(pattern, fault.finders)
        if not is_wanted or not tree.without(fault.commit):
            continue
        outcome, finders, _ = tree.run(files)
        print(f"{fault.commit} {outcome:9}{fault.subject[:70]} {finders}", flush=True)
        if finders:
            fault.outcome = outcome
            fault.finders = _SEVERAL.join(dict.fromkeys([*filter(None, fault.finders.split(_SEVERAL)), *finders]))
            _write(faults)


def _fixes(touching=""):
    """Return the commits that may have mended something, the latest first: those that say so, then the others."""
    others = []
    log = _git("log", "--no-merges", "--name-only", "--format=%x00%h%x1f%s%x1f")
    for entry in log.split("\0")[1:]:
        commit, subject, names = entry.split("\x1f")
        files = names.split()
        sources = [each for each in files if re.fullmatch(r"packages/[^/]+/src/.*\.py", each)]
        tests = [each for each in files if re.fullmatch(r"tests/.*test_\w+\.py", each)]
        tests = [each for each in tests if re.search(touching, each)]
        if sources and tests and (_SAYS_SO.search(subject) or any(_FRAGMENT.search(each) for each in files)):
            yield commit
        elif sources and tests:
            others.append(commit)
    yield from others


def _tried(tree, commit):
    """Return what a fault does; ``None`` where the change can't be taken back."""
    if not tree.without(commit):
        return None
    sources = _git("diff", "--name-only", f"{commit}^", commit, "--", _SOURCES).split()
    fault = Fault(commit, _git("log", "-1", "--format=%s", commit).strip(), " ".join(sources))
    named, whole = _its_tests(tree, commit)
    if not whole:
        fault.outcome = "untested"
        return fault
    for tests in [named, whole] if named else [whole]:
        fault.outcome, finders, fault.how = tree.run(tests)
        if fault.outcome != "missed":
            break
    fault.finders = _SEVERAL.join(finders)
    return fault


def _its_tests(tree, commit):
    """Return the tests that a commit added or changed and that are still there, and the files that it touched."""
    there = {path.name: path.relative_to(tree.root).as_posix() for path in tree.root.glob("tests/**/test_*.py")}
    named, whole, name = [], [], ""
    for line in _git("diff", "-U0", f"{commit}^", commit, "--", _TESTS).splitlines():
        if line.startswith("+++ "):
            name = there.get(line.rpartition("/")[2], "")
            whole += [name] if name else []
        change = re.match(r"(?:\+|@@.*@@ )def (test_\w+)", line)
        if name and change and f"\ndef {change[1]}(" in (tree.root / name).read_text(encoding="utf-8"):
            named.append(f"{name}::{change[1]}")
    return list(dict.fromkeys(named)), whole


class _Tree:
    """A clone of this repository, with and without a fault.

    Args:
        root: Where it is made.
        seconds: Time limit of a run.
    """

    def __init__(self, root, seconds):
        self.root, self._sound, self._seconds = root / "tree", root / "sound", seconds
        for each in (self.root, self._sound):
            _git("clone", "--quiet", "--shared", str(ROOT), str(each))

    def without(self, commit):
        """Take a commit's change of the sources back; return whether it applies."""
        git = partial(_git, "-C", str(self.root))
        git("reset", "--quiet", "--hard")
        git("clean", "--quiet", "-fdx", "packages", "tests")
        for file in _git("diff", "--name-only", f"{commit}^", commit, "--", _SOURCES).split():
            if not (self.root / file).exists():
                continue
            change = _git("diff", f"{commit}^", commit, "--", file)
            if not self._apply(change, "--3way"):
                git("checkout", "--quiet", "HEAD", "--", file)
                self._apply(change, "-C2", "--reject")  # those hunks of which the lines are still there
        git("clean", "--quiet", "-fdx", "packages")  # the others
        changed = git("diff", "HEAD", "--name-only").split()
        most = sum(map(int, re.findall(r"(\d+) (?:ins|del)", git("diff", "HEAD", "--shortstat"))))
        return most <= _MOST_LINES and any(_code(self.root / each) != _code(self._sound / each) for each in changed)

    def _apply(self, change, *options):
        command = ("git", "apply", "--reverse", "--whitespace=nowarn", *options, "-")
        done = subprocess.run(command, cwd=self.root, input=change, text=True, capture_output=True, check=False)
        return done.returncode == 0

    def run(self, tests):
        """Return the outcome of a run, the tests that fail though they pass without the fault, and the first error."""
        failed = self._failed(self.root, tests)
        if failed is None:
            return "late", [], ""
        if not failed:
            return "missed", [], ""
        name, how = failed[0]
        if "::" not in name or _OF_CODE.match(how):
            return "unfit", [], how
        if self._failed(self._sound, [name]) != []:
            return "missed", [], "fails without the fault as well"
        return "found", [name], how

    def _failed(self, root, tests):
        """Return the test that fails, with its error, in a list; ``None`` if there is no end in time."""
        report = root.with_suffix(".xml")
        report.unlink(missing_ok=True)
        sources = os.pathsep.join(map(str, sorted(root.glob("packages/*/src"))))
        environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *tests]
        with subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        ) as process:
            try:
                process.wait(self._seconds + 30)  # to import and collect
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks end with it
                return None
        if not report.exists():
            return [("", "pytest did not start")]
        cases = ET.parse(report).getroot().iter("testcase")
        bad = [(case, each) for case in cases for each in case if each.tag in ("failure", "error")]
        return [(_id_of(case), _first_line(each)) for case, each in bad[:1]]


def _id_of(case):
    """Return the test's id, as pytest takes it."""
    file, classes = case.get("file"), case.get("classname", "")
    if file is None:
        return classes
    inner = classes.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join(each for each in (file, inner, case.get("name")) if each)


def _first_line(failure):
    """Return the error itself: that of the rank where a rank failed."""
    text = f"{failure.get('message', '')}\n{failure.text or ''}"
    of_rank = re.search(r"^(?:E\s+)?((?:\w+\.)*\w*(?:Error|Exception|Warning)\b.*)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    found = re.sub(r"\s+", " ", of_rank[1] if of_rank else lines[0])
    return re.sub(r"/\S*?/tree/", "", found)[:160]  # the scratch clone's place


def _code(file):
    """Return what a file does, without comments and docstrings; nothing for what is no Python, or not there."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, FileNotFoundError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.dump(tree)


def _git(*arguments):
    return subprocess.run(("git", *arguments), cwd=ROOT, text=True, capture_output=True, check=True).stdout


def _read():
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Fault(**row) for row in csv.DictReader(file)]


def _write(faults):
    partial = TABLE.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Fault)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, faults))
    partial.replace(TABLE)


if __name__ == "__main__":
    main()
