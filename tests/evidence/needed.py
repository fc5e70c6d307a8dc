"""Say whether tests may go: plant faults in what they test, and run other tests; those that these miss need them.

    python tests/evidence/needed.py --sources packages/booster-runtime/src/booster_runtime/whole_tensors.py \\
        --tests tests/together/test_gathering.py --others tests/runtime/test_gathered_tensors.py

A fault is one changed operator, constant, condition or statement (`tests/shared/mutation`) on a line that the tests in
question run, in functions that ``::name`` chooses, and in as many of these as there are. Of the other tests, files that
run the line run first; where they miss a fault, the tests in question run. A line for each question is added to
`deleted.csv` in this folder, with the faults that these tests alone find.
"""

import argparse
import ast
import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from mutation.mutants import mutants_of

ROOT = Path(__file__).parents[2]
PYTEST = ("pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")
TABLE = Path(__file__).with_name("deleted.csv")
FIELDS = ("tests", "others", "sources", "planted", "found by others", "found by these alone", "which")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="+", required=True, metavar="FILE[::FUNCTION]")
    parser.add_argument("--tests", nargs="+", required=True, help="those that may go")
    parser.add_argument("--others", nargs="+", required=True, help="those that stay")
    parser.add_argument("--number", type=int, default=20, help="of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of a run of tests")
    asked = parser.parse_args()
    by_others, alone = 0, []
    with tempfile.TemporaryDirectory(prefix="needed-") as folder:
        root = Path(folder) / "tree"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(root)], check=True)
        run = partial(failed, root, seconds=asked.seconds)
        sources = [each.partition("::")[0] for each in asked.sources]
        own = _lines_run(root, asked.tests, sources)
        others = {each: _lines_run(root, [each], sources) for each in asked.others}
        chosen = _chosen(asked, own)
        for source, mutant in chosen:
            _plant(root / source, mutant)
            label = f"{Path(source).name}:{mutant.line} {mutant.before} -> {mutant.after}"
            running = [each for each, lines in others.items() if mutant.line in lines[source]]
            finders = running and run(running, "-x")
            by_others += bool(finders)
            if not finders:
                finders = run(asked.tests)
                alone += [label] * bool(finders)
                finders = [f"ALONE {each}" for each in finders] or ["nobody"]
            print(label[:110], *finders, sep="\n    ", flush=True)
            (root / source).write_bytes((ROOT / source).read_bytes())
    row = [" ".join(asked.tests), " ".join(asked.others), " ".join(asked.sources), len(chosen), by_others, len(alone)]
    is_new = not TABLE.exists()
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(FIELDS)
        writer.writerow([*row, "; ".join(alone)])
    print(f"{len(chosen)} planted: {by_others} found by others, {len(alone)} by these tests alone")


def _environment(root):
    """Return variables with which tests of a clone find its sources."""
    paths = os.pathsep.join(map(str, sorted(root.glob("packages/*/src"))))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def _lines_run(root, tests, sources):
    """Return which lines of each source tests run, on ranks as well."""
    data = root.with_name("coverage")
    environment = {**_environment(root), "COVERAGE_FILE": str(data)}
    for arguments in (
        ["run", f"--include={','.join(sources)}", "-m", *PYTEST, *tests],
        ["combine", "--quiet"],
        ["json", "--quiet", "--ignore-errors", "-o", f"{data}.json"],
    ):
        command = [sys.executable, "-m", "coverage", *arguments]
        subprocess.run(command, cwd=root, env=environment, capture_output=True, check=False)
    report = json.loads(Path(f"{data}.json").read_bytes())["files"]
    for each in data.parent.glob("coverage*"):
        each.unlink()
    return {source: set(report.get(source, {}).get("executed_lines", ())) for source in sources}


def _chosen(asked, lines):
    """Return faults on lines that run, each function's in turn."""
    draw, functions = random.Random(asked.seed), defaultdict(list)
    for source in asked.sources:
        file = source.partition("::")[0]
        for mutant in _faults(source):
            if mutant.line in lines[file]:
                functions[file, mutant.function].append((file, mutant))
    groups = [draw.sample(faults, len(faults)) for faults in draw.sample(list(functions.values()), len(functions))]
    in_turn = [fault for fault in chain.from_iterable(zip_longest(*groups)) if fault is not None]
    return in_turn[: asked.number]


def _faults(source):
    file, _, function = source.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    return mutants_of(ast.parse(text), text, (function,) if function else ())


def _plant(file, mutant):
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    wanted = (mutant.function, mutant.line, mutant.before, mutant.after)
    found = (each for each in mutants_of(tree, text) if (each.function, each.line, each.before, each.after) == wanted)
    next(found).plant()
    file.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def failed(root, tests, *options, seconds):
    """Return the tests that fail, or what else went wrong."""
    report = root.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", *PYTEST, *options, f"--junitxml={report}", *tests]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=root, env=_environment(root), process_group=0, **quiet) as process:
        try:
            process.wait(seconds + 30)  # to import and collect
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks end with it
            return ["no end in time"]
    if not report.exists():
        return ["pytest did not start"]
    cases = ET.parse(report).getroot().iter("testcase")
    bad = [case for case in cases if any(each.tag in ("failure", "error") for each in case)]
    return [f"{case.get('file', case.get('classname'))}::{case.get('name')}" for case in bad]


if __name__ == "__main__":
    main()
