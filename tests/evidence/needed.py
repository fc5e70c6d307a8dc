"""Say whether tests may go: plant faults in what they test, and run other tests; those that these miss need them.

    python tests/evidence/needed.py --sources packages/booster-runtime/src/booster_runtime/whole_tensors.py \\
        --tests tests/together/test_gathering.py --others tests/runtime/test_gathered_tensors.py

A fault is one changed operator, constant, condition or statement (`tests/shared/mutation`), in functions that
``::name`` chooses. The other tests run first; where they miss a fault, the tests in question run. A line for each
question is added to `deleted.csv` in this folder, with the faults that these tests alone find.
"""

from __future__ import annotations

import argparse
import ast
import csv
import random
import sys
import tempfile
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
    parser.add_argument("--number", type=int, default=10, help="of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of a run of tests")
    asked = parser.parse_args()
    faults = [(each.partition("::")[0], mutant) for each in asked.sources for mutant in _faults(each)]
    chosen = random.Random(asked.seed).sample(faults, min(asked.number, len(faults)))
    by_others, alone = 0, []
    with tempfile.TemporaryDirectory(prefix="needed-") as folder:
        tree = _Tree(Path(folder), asked.seconds)
        for source, mutant in chosen:
            _plant(tree.root / source, mutant)
            label = f"{Path(source).name}:{mutant.line} {mutant.before} -> {mutant.after}"
            finder = _finder(tree, asked.others)
            by_others += bool(finder)
            if not finder:
                finder = _finder(tree, asked.tests)
                alone += [label] * bool(finder)
                finder = f"ALONE {finder}" if finder else "nobody"
            print(f"{label[:110]}\n    {finder}", flush=True)
            (tree.root / source).write_bytes((ROOT / source).read_bytes())
    row = [" ".join(asked.tests), " ".join(asked.others), " ".join(asked.sources), len(chosen), by_others, len(alone)]
    is_new = not TABLE.exists()
    with TABLE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(FIELDS)
        writer.writerow([*row, "; ".join(alone)])
    print(f"{len(chosen)} planted: {by_others} found by others, {len(alone)} by these tests alone")


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


def _finder(tree, tests):
    """Return the first test that fails, or what else went wrong; nothing if all pass."""
    failed = tree._failed(tree.root, tests)
    return "no end in time" if failed is None else (failed[0][0] or failed[0][1]) if failed else ""


if __name__ == "__main__":
    main()
