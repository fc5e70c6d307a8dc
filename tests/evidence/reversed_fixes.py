"""Take past fixes back, one at a time, on HEAD, and write which tests find that into `finders.csv` in this folder.

A fix is a commit that changed sources and tests. First come those with a changelog fragment *fixed* or *numerics* or
that say so in their first line. The change of the sources is applied backwards in a clone of this repository, as far
as its lines are still there; then the tests that the commit added or changed run until one fails. A test that fails
without the fault as well does not count.

Where a commit as a whole is too large, or the sources no longer work without it, its changes of single functions are
faults of their own, if they merge backwards without a conflict, change more than names and texts, and take away
nothing that other code mentions.

    python tests/evidence/reversed_fixes.py --limit 100
    python tests/evidence/reversed_fixes.py --with tests/together/test_programs.py  # do these find the listed faults?

A line of the table is a fault: the commit, the files it changed, the function if it is not the whole commit, how the
fault shows, and the tests that find it.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
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
_MOST_PARTS, _LARGE = 5, 600
"""How many functions of a commit are tried, if it changed no more lines: a larger one is no fix."""


@dataclass
class Fault:
    """A line of the table.

    Args:
        commit: The fix.
        subject: Its first line.
        sources: What it changed.
        function: The function that is as before the fix, where it is not all of the commit.
        outcome: ``found``; ``missed`` by its own tests; ``late`` if they take longer than the limit; ``unfit`` if the
            sources no longer work without it; ``untested`` if its tests are gone; ``none`` if it is no fault any more.
        how: The error's first line, or why it is no fault.
        finders: Tests that fail.
    """

    commit: str
    subject: str
    sources: str
    function: str = ""
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
    parser.add_argument("--again", default="", help="try the table's faults again whose outcome matches this pattern")
    parser.add_argument("--jobs", type=int, default=1, help="how many commits at a time")
    arguments = parser.parse_args()
    faults = _read()
    with tempfile.TemporaryDirectory(prefix="reversed-fixes-") as folder:
        trees = [_Tree(Path(folder) / str(number), arguments.seconds) for number in range(arguments.jobs)]
        if arguments.files:
            _try_files(trees[0], faults, arguments.files, arguments.of)
            return
        if arguments.again:
            _try_again(trees[0], faults, arguments.again)
            return
        kinds = _fixes(arguments.touching)
        tries = ((commit, tried) for tried in (_try_whole, _try_parts) for commits in kinds for commit in commits)
        lock = Lock()

        def add(fault):
            with lock:
                faults.append(fault)
                arguments.limit -= fault.outcome in ("found", "missed", "late")
                _write(faults)
                name = f"{fault.commit} {fault.function}".strip()
                print(f"{name} {fault.outcome:9}{fault.subject[:70]}\n    {fault.finders or fault.how}", flush=True)

        def work(tree):
            while arguments.limit > 0:
                with lock:
                    commit, tried = next(tries, (None, None))
                    known = {fault.function: fault for fault in faults if fault.commit == commit}
                if commit is None:
                    return
                tried(tree, commit, known, add)

        with ThreadPoolExecutor(len(trees)) as pool:
            list(pool.map(work, trees))


def _try_files(tree, faults, files, pattern):
    """Print which faults tests of these files find, and add them to the table."""
    for fault in faults:
        is_wanted = fault.outcome in ("found", "missed", "late") and re.search(pattern, fault.finders)
        if not is_wanted or not tree.without(fault.commit, _part_of(fault)):
            continue
        outcome, finders, _ = tree.run(files)
        print(f"{fault.commit} {outcome:9}{fault.subject[:70]} {finders}", flush=True)
        if finders:
            fault.outcome = outcome
            fault.finders = _SEVERAL.join(dict.fromkeys([*filter(None, fault.finders.split(_SEVERAL)), *finders]))
            _write(faults)


def _try_again(tree, faults, pattern):
    """Replace lines of the table by what happens now; those of changes that are no faults any more are left out."""
    for fault in [each for each in faults if re.fullmatch(pattern, each.outcome)]:
        part = _part_of(fault)
        place = faults.index(fault)
        faults[place : place + 1] = [_tried(tree, fault.commit, part)] if tree.without(fault.commit, part) else []
        print(fault.commit, fault.function, *(each.outcome for each in faults[place : place + 1]), flush=True)
        _write(faults)


def _fixes(touching=""):
    """Return the commits that may have mended something, the latest first: those that say so, and the others."""
    says_so, others = [], []
    log = _git("log", "--no-merges", "--name-only", "--format=%x00%h%x1f%s%x1f")
    for entry in log.split("\0")[1:]:
        commit, subject, names = entry.split("\x1f")
        files = names.split()
        sources = [each for each in files if re.fullmatch(r"packages/[^/]+/src/.*\.py", each)]
        tests = [each for each in files if re.fullmatch(r"tests/.*test_\w+\.py", each)]
        tests = [each for each in tests if re.search(touching, each)]
        if sources and tests and (_SAYS_SO.search(subject) or any(_FRAGMENT.search(each) for each in files)):
            says_so.append(commit)
        elif sources and tests:
            others.append(commit)
    return says_so, others


def _try_whole(tree, commit, known, add):
    if not known and tree.without(commit):
        add(_tried(tree, commit))


def _try_parts(tree, commit, known, add):
    """Take each function of a commit back alone, where the whole is no fault that could happen."""
    if ("" in known and known[""].outcome != "unfit") or _size(
        _git("diff", "--shortstat", f"{commit}^", commit, "--", _SOURCES)
    ) > _LARGE:
        return
    parts = [part for part in _parts(commit) if tree.without(commit, part)]
    for part in parts[:_MOST_PARTS]:
        if _name_of(part) not in known:
            tree.without(commit, part)
            fault = _tried(tree, commit, part)
            add(fault)
            if fault.outcome == "late":  # the others' tests are the same
                return


def _tried(tree, commit, part=None):
    """Return what the fault in a tree does, that of a commit or of a function of it."""
    sources = [part[0]] if part else _git("diff", "--name-only", f"{commit}^", commit, "--", _SOURCES).split()
    subject = _git("log", "-1", "--format=%s", commit).strip()
    fault = Fault(commit, subject, " ".join(sources), _name_of(part) if part else "")
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


def _parts(commit):
    """Return the changes of a commit by file and function, as ``(file, function, hunks)``."""
    parts = {}
    for file in _git("diff", "--name-only", "--diff-filter=M", f"{commit}^", commit, "--", _SOURCES).split():
        tree = ast.parse(_git("show", f"{commit}:{file}"))
        for hunk in _hunks(commit, file)[1:]:
            parts.setdefault((file, _function_at(tree, _changed_line(hunk))), []).append(hunk)
    return [(file, function, hunks) for (file, function), hunks in parts.items()]


def _part_of(fault):
    """Return the part of a commit that a line of the table names; ``None`` for the whole."""
    return next((part for part in _parts(fault.commit) if _name_of(part) == fault.function), None)


def _name_of(part):
    file, function, _ = part
    return f"{Path(file).name}:{function}"


def _hunks(commit, file):
    """Return the header of a file's change, and its hunks with one line around each."""
    change = _git("diff", "-U1", f"{commit}^", commit, "--", file)
    return re.split(r"^(?=@@ )", change, flags=re.MULTILINE)


def _changed_line(hunk):
    """Return the first line that a hunk changes, by its number after the fix."""
    start, *lines = hunk.splitlines()
    first = next(index for index, line in enumerate(lines) if line[0] != " ")
    return int(re.match(r"@@ -\S+ \+(\d+)", start)[1]) + first


def _function_at(node, line):
    """Return the qualified name of the outermost function around a line, or of the class."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
        if first <= line <= child.end_lineno:
            inner = _function_at(child, line) if isinstance(child, ast.ClassDef) else ""
            return f"{child.name}.{inner}".strip(".")
    return ""


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

    PYTEST = ("pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")

    def __init__(self, root, seconds):
        self.root, self._sound, self._seconds = root / "tree", root / "sound", seconds
        for each in (self.root, self._sound):
            _git("clone", "--quiet", "--shared", str(ROOT), str(each))

    def without(self, commit, part=None):
        """Take a commit's change of the sources back, or a part of it; return whether that is a fault."""
        git = partial(_git, "-C", str(self.root))
        git("reset", "--quiet", "--hard")
        git("clean", "--quiet", "-fdx", "packages", "tests")
        if part is not None:
            return self._take_part_back(commit, *part)
        for file in _git("diff", "--name-only", f"{commit}^", commit, "--", _SOURCES).split():
            if not (self.root / file).exists():
                continue
            change = _git("diff", f"{commit}^", commit, "--", file)
            if not self._apply(change, "--3way"):
                git("checkout", "--quiet", "HEAD", "--", file)
                self._apply(change, "-C2", "--reject")  # those hunks of which the lines are still there
        git("clean", "--quiet", "-fdx", "packages")  # the others
        changed = git("diff", "HEAD", "--name-only").split()
        return self._is_small() and any(
            _behaviour(self.root / each) != _behaviour(self._sound / each) for each in changed
        )

    def _take_part_back(self, commit, file, function, hunks):
        now = _place(commit, file)
        if now is None or not function:
            return False
        change = _hunks(commit, file)[0].replace(file, now) + "".join(hunks)
        if not self._apply(change, "--3way") or not self._is_small():
            return False
        before, after = ((root / now) for root in (self._sound, self.root))
        if _behaviour(before) == _behaviour(after):
            return False
        gone = _definitions(before) - _definitions(after)
        mentioned = any(_git("-C", str(self.root), "grep", "-wl", name, "--", "packages", check=False) for name in gone)
        ruff = (sys.executable, "-m", "ruff", "check", "--quiet", "--select", "F821", str(after))
        return not mentioned and subprocess.run(ruff, capture_output=True, check=False).returncode == 0

    def _is_small(self):
        return _size(_git("-C", str(self.root), "diff", "HEAD", "--shortstat")) <= _MOST_LINES

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

    def environment(self, root):
        """Return the variables with which tests of a clone find its sources."""
        return {"PYTHONPATH": os.pathsep.join(map(str, sorted(root.glob("packages/*/src")))), "OMP_NUM_THREADS": "1"}

    def _failed(self, root, tests, *, stop=True):
        """Return the test that fails, with its error, in a list, or all; ``None`` if there is no end in time."""
        report = root.with_suffix(".xml")
        report.unlink(missing_ok=True)
        environment = {**os.environ, **self.environment(root)}
        command = [sys.executable, "-m", *self.PYTEST, *["-x"] * stop, f"--junitxml={report}", *tests]
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
        return [(_id_of(case), _first_line(each)) for case, each in bad]


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
    errors = re.findall(r"^(?:E\s+)?((?:\w+\.)*\w*(?:Error|Exception|Warning)\b.*)$", text, re.MULTILINE)
    errors = [each for each in errors if "rank_pool.Rank" not in each] or errors
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    found = re.sub(r"\s+", " ", (errors or lines)[0])
    # The places of the scratch clone and of tests' files.
    return re.sub(r"/\S*?/tree/|/\S*?/pytest-\d+/", "", found)[:160]


def _behaviour(file):
    """Return what a file does, without imports, annotations, prose, and the names of variables of functions.

    Nothing for what is no Python, or not there.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, FileNotFoundError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _rename_variables(node)
    return ast.dump(_Plain().visit(tree))


def _rename_variables(function):
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    numbers = {}
    for node in ast.walk(function):
        field = "arg" if isinstance(node, ast.arg) else "id" if isinstance(node, ast.Name) else None
        if field and getattr(node, field) in own:
            setattr(node, field, f"variable{numbers.setdefault(getattr(node, field), len(numbers))}")


class _Plain(ast.NodeTransformer):
    """Leaves out what does nothing, or only words a message."""

    def visit_Import(self, node):
        return None

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node):
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    def visit_JoinedStr(self, node):
        return ast.Constant("")

    def visit_arg(self, node):
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        node.annotation = ast.Constant("")
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.returns = None
        return node


def _size(shortstat):
    return sum(map(int, re.findall(r"(\d+) (?:ins|del)", shortstat)))


def _definitions(file):
    """Return the names of functions and classes of a file."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}


def _place(commit, file):
    """Return where a file of a commit is now; ``None`` if it is gone."""
    if (ROOT / file).exists():
        return file
    moved = re.search(rf"^R\d+\t{re.escape(file)}\t(\S+)$", _moves(commit), re.MULTILINE)
    return moved[1] if moved else None


@lru_cache(4)
def _moves(commit):
    return _git("diff", "-M40%", "--diff-filter=R", "--name-status", commit, "HEAD", "--", _SOURCES)


def _git(*arguments, check=True):
    return subprocess.run(("git", *arguments), cwd=ROOT, text=True, capture_output=True, check=check).stdout


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
