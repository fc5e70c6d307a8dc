"""Plant faults in the targets, or in those whose names are passed, and report those that the tests miss.

``--list`` shows the targets.
"""

import argparse
import ast
import csv
import os
import sys
import time
from pathlib import Path

from mutation.mutants import mutants_of
from mutation.running import import_what_tests_need, survivors_of
from mutation.targets import ROOT, TARGETS

EQUIVALENT = Path(__file__).with_name("equivalent.csv")


def main():
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names of targets; all by default")
    parser.add_argument("--list", action="store_true", help="show the targets and the number of their mutants")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 2) // 2))
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.targets) - TARGETS.keys())
    if unknown:
        parser.error(f"No target named {', '.join(unknown)}. There are: {', '.join(TARGETS)}.")
    if arguments.list:
        for name in TARGETS:
            print(f"{name}: {len(_read(name)[1])} mutants, {', '.join(TARGETS[name].tests)}")
        return 0
    os.chdir(ROOT)
    import_what_tests_need()
    failed = [name for name in arguments.targets or TARGETS if not _run(name, arguments.workers)]
    if failed:
        print(f"\nMutants survived in {', '.join(failed)}. Write a test that fails with each, or list it in")
        print(f"{EQUIVALENT.relative_to(ROOT)} with the reason why no test can.")
    return 1 if failed else 0


def _read(name):
    target = TARGETS[name]
    text = target.path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return tree, mutants_of(tree, text, target.functions)


def _equivalent(name):
    """Return the mutants of a target that no test can find, because the program does the same with them.

    One that is no mutant any more, or that a test finds, fails the session, so that the list stays short.
    """
    with EQUIVALENT.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["target"] == name]
    return {(row["function"], row["line"], row["change"]) for row in rows}


def _run(name, num_workers):
    """Run one target, and return whether each mutant is found or listed."""
    tree, mutants = _read(name)
    begin = time.monotonic()
    survivors = [mutants[position] for position in survivors_of(TARGETS[name], mutants, tree, num_workers)]
    listed = _equivalent(name)
    missed = [mutant for mutant in survivors if mutant.key not in listed]
    stale = listed - {mutant.key for mutant in survivors}
    counts = f"{len(mutants) - len(survivors)} killed, {len(survivors) - len(missed)} equivalent, {len(missed)} missed"
    print(f"{name}: {len(mutants)} mutants, {counts} ({time.monotonic() - begin:.0f} s)")
    for mutant in missed:
        print(f"  missed, line {mutant.line}: {mutant.source}\n    {mutant.key!r}")
    for key in sorted(stale):
        print(f"  listed as equivalent, but found or gone: {key!r}")
    return not missed and not stale


if __name__ == "__main__":
    sys.exit(main())
