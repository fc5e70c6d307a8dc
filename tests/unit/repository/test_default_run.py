"""What tests/conftest.py reads of the markers and tables of the default run names tests and files that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_parts import ARITHMETIC
from long_files import LONGEST_FIRST

from booster_testing.conformance import PluginConformance

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_kit_has_each_test_that_variants_run(name):
    assert hasattr(PluginConformance, name.partition("[")[0])


def test_the_longest_files_exist():
    assert [name for name in LONGEST_FIRST if not (TESTS / name).is_file()] == []
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)
