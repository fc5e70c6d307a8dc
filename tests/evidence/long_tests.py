"""Print the tests of a run that took long and find no fault of `finders.csv` alone: candidates for `long.txt`.

    python tests/evidence/long_tests.py build/tests.xml --above 1.0

A test may be added there while the default run keeps another that would find what it finds.
"""

import argparse
import csv
import functools
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

FOLDER = Path(__file__).parent


@functools.cache
def listed():
    """Return the tests of `long.txt`, by what pytest calls them, with or without their parameters."""
    lines = (FOLDER / "long.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition(" ")[2] for line in lines if not line.startswith("#")}


def finders():
    """Return the tests that find a fault that no test except those of `long.txt` finds, by name."""
    with (FOLDER / "finders.csv").open(encoding="utf-8", newline="") as file:
        found = [row["finders"].split(" | ") for row in csv.DictReader(file)]
    return {each for tests in found for each in tests if all(is_long(other) for other in tests if other != each)}


def is_long(test):
    """Return whether a test is listed, itself or with all its values."""
    return not listed().isdisjoint((test, test.partition("[")[0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--above", type=float, default=1.0, help="seconds")
    arguments = parser.parse_args()
    needed, seconds = finders(), Counter()
    for case in ET.parse(arguments.report).getroot().iter("testcase"):
        folder, _, rest = case.get("classname", "").partition(".test_")
        name, *classes = rest.split(".")
        path = f"{folder.replace('.', '/')}/test_{name}.py"
        seconds["::".join([path, *classes, case.get("name", "")])] = float(case.get("time", 0))
    print(f"{sum(seconds.values()):.0f} s in {len(seconds)} tests")
    for test, took in seconds.most_common():
        if took >= arguments.above and test not in needed and not is_long(test):
            print(f"{took:.1f} {test}")


if __name__ == "__main__":
    main()
