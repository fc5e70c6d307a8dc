"""The list of cases that the default run leaves out names tests that exist."""

import re
from pathlib import Path

from long_run import LONG_RUN

TESTS = Path(__file__).parents[2]


def test_every_case_belongs_to_a_test():
    assert LONG_RUN
    kit = (TESTS.parent / "packages/booster-testing/src/booster_testing").glob("*conformance*.py")
    inherited = "".join(path.read_text() for path in kit)
    for name in LONG_RUN:
        file, *classes, function = re.sub(r"\[.*", "", name, flags=re.DOTALL).split("::")
        text = (TESTS / file).read_text()
        assert f"def {function}(" in text + (inherited if classes else ""), name
        assert all(re.search(rf"^class {each}\b", text, re.MULTILINE) for each in classes), name
