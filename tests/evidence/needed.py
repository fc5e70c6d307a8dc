"""Say whether tests may go: plant faults in what they test, and run other tests; those that these miss need them.

    python tests/evidence/needed.py --sources packages/booster-runtime/src/booster_runtime/whole_tensors.py \\
        --tests tests/together/test_gathering.py --others tests/runtime/test_gathered_tensors.py

A fault is one changed operator, constant, condition or statement (`tests/shared/mutation`) on a line that the tests in
question run, in functions that ``::name`` chooses, and in as many of these as there are. Of the other tests, files that
run the line run first; where they miss a fault, the tests in question run. A line for each question is added to
`deleted.csv` in this folder, with the faults that these tests alone find.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import chain, zip_longest
from pathlib import Path

from reversed_fixes import ROOT, _Tree

sys.path.insert(0, str(ROOT / "tests" / "shared"))

from mutation.mutants import mutants_of

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
        tree = _Tree(Path(folder), asked.seconds)
        sources = [each.partition("::")[0] for each in asked.sources]
        own = _lines_run(tree, asked.tests, sources)
        others = {each: _lines_run(tree, [each], sources) for each in asked.others}
        chosen = _chosen(asked, own)
        for source, mutant in chosen:
            _plant(tree.root / source, mutant)
            label = f"{Path(source).name}:{mutant.line} {mutant.before} -> {mutant.after}"
            running = [each for each, lines in others.items() if mutant.line in lines[source]]
            finders = running and _finders(tree, running)
            by_others += bool(finders)
            if not finders:
                finders = _finders(tree, asked.tests, stop=False)
                alone += [label] * bool(finders)
                finders = [f"ALONE {each}" for each in finders] or ["nobody"]
            print(label[:110], *finders, sep="\n    ", flush=True)
            (tree.root / source).write_bytes((ROOT / source).read_bytes())
    row = [" ".join(asked.tests), " ".join(asked.others), " ".join(asked.sources), len(chosen), by_others, len(alone)]
    is_new = not TABLE.exists()
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(FIELDS)
        writer.writerow([*row, "; ".join(alone)])
    print(f"{len(chosen)} planted: {by_others} found by others, {len(alone)} by these tests alone")


def _lines_run(tree, tests, sources):
    """Return which lines of each source tests run, on ranks as well."""
    data = tree.root.with_name("coverage")
    environment = {**os.environ, **tree.environment(tree.root), "COVERAGE_FILE": str(data)}
    for arguments in (
        ["run", f"--include={','.join(sources)}", "-m", *tree.PYTEST, *tests],
        ["combine", "--quiet"],
        ["json", "--quiet", "--ignore-errors", "-o", f"{data}.json"],
    ):
        command = [sys.executable, "-m", "coverage", *arguments]
        subprocess.run(command, cwd=tree.root, env=environment, capture_output=True, check=False)
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


def _finders(tree, tests, *, stop=True):
    """Return the tests that fail, at most one with ``stop``, or what else went wrong."""
    failed = tree._failed(tree.root, tests, stop=stop)
    return ["no end in time"] if failed is None else [name or how for name, how in failed]


if __name__ == "__main__":
    main()
