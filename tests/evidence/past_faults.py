"""Take past fixes back, one at a time, and see whether the tests that `finders.csv` names still find that.

    python tests/evidence/past_faults.py                     # all of the table
    python tests/evidence/past_faults.py 62479cca dc6110ee   # those of these fixes

The change of the sources is applied backwards in a clone of this repository, as far as its lines are still there, of
the whole fix or of the one function that the table names. What is found, and what can't be taken back any more, is
written into the table; the command fails if a fault is missed.
"""

import argparse
import ast
import csv
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from needed import ROOT, failed

TABLE = Path(__file__).with_name("finders.csv")
SEVERAL = " | "
GONE = {"none": "its lines are no longer there", "unfit": "the sources no longer work without it"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", help="the fixes, as the table names them; none for all")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of a fault's tests")
    asked = parser.parse_args()
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    missed = 0
    with tempfile.TemporaryDirectory(prefix="past-faults-") as folder:
        sound, faulty = (Path(folder) / name / "tree" for name in ("sound", "faulty"))
        for each in (sound, faulty):
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(each)], check=True)
        for row in rows:
            if row["outcome"] != "found" or (asked.commits and row["commit"] not in asked.commits):
                continue
            finders = row["finders"].split(SEVERAL)
            outcome = tried(sound, faulty, row["commit"], row["function"], finders, asked.seconds)
            missed += outcome == "missed"
            if outcome in GONE:
                row.update(outcome=outcome, how=GONE[outcome], finders="")
            print(f"{row['commit']} {outcome:7}{row['subject'][:90]}", flush=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    sys.exit(f"{missed} faults are missed" if missed else None)


def tried(sound, faulty, commit, function, finders, seconds):
    """Return what becomes of a fault: ``found``, ``missed``, or why it is none any more."""
    if not take_back(faulty, commit, function):
        return "none"
    found = failed(faulty, finders, "-x", seconds=seconds)
    if not found:
        return "missed"
    # A test that does not begin, or fails on sound sources as well, says nothing of the fault.
    return "found" if found[0] in finders and not failed(sound, found, seconds=seconds) else "unfit"


def take_back(root, commit, function):
    """Take a fix of the sources back in a clone, or its change of one function; return whether that changes code."""
    git(root, "reset", "--quiet", "--hard")
    git(root, "clean", "--quiet", "-fdx", "packages", "tests")
    for file in git(ROOT, "diff", "--name-only", f"{commit}^", commit, "--", "packages/*/src/**/*.py").split():
        if not (root / file).exists() or (function and Path(file).name != function.partition(":")[0]):
            continue
        change = git(ROOT, "diff", f"-U{1 if function else 3}", f"{commit}^", commit, "--", file)
        header, *hunks = re.split(r"^(?=@@ )", change, flags=re.MULTILINE)
        if function:
            inside = lines_of(git(ROOT, "show", f"{commit}:{file}"), function.partition(":")[2])
            hunks = [each for each in hunks if first_changed(each) in inside]
        if not apply(root, change := header + "".join(hunks), "--3way"):
            git(root, "checkout", "--quiet", "HEAD", "--", file)
            apply(root, change, "-C2", "--reject")  # those parts of which the lines are still there
    git(root, "clean", "--quiet", "-fdx", "packages")
    changed = git(root, "diff", "HEAD", "--name-only").split()
    return any(code(root / each) != code(ROOT / each) for each in changed)


def lines_of(source, function):
    """Return the numbers of the lines of a function, by its qualified name; none where it is of another file."""
    found = ast.parse(source)
    for wanted in function.split("."):
        found = next((each for each in found.body if getattr(each, "name", "") == wanted), None)
        if found is None:
            return range(0)
    return range(found.lineno, found.end_lineno + 1)


def first_changed(hunk):
    """Return the number of the first line that a hunk changes, after the change."""
    start, *lines = hunk.splitlines()
    unchanged = next(index for index, line in enumerate(lines) if line[0] != " ")
    return int(re.match(r"@@ -\S+ \+(\d+)", start)[1]) + unchanged


def code(file):
    """Return what a file does, without comments and docstrings; nothing if it is not there."""
    if not file.exists():
        return ""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.dump(tree)


def apply(root, change, *options):
    command = ("git", "apply", "--reverse", "--whitespace=nowarn", *options, "-")
    done = subprocess.run(command, cwd=root, input=change, text=True, capture_output=True, check=False)
    return done.returncode == 0


def git(root, *arguments):
    return subprocess.run(("git", *arguments), cwd=root, text=True, capture_output=True, check=False).stdout


if __name__ == "__main__":
    main()
