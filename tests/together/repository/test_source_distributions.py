"""A package's source distribution has the package's tests, of every kind."""

from __future__ import annotations

from pathlib import Path

import nox
import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_source_distributions_include_all_tests_of_their_package(package):
    targets = nox.project.load_toml(package / "pyproject.toml")["tool"]["hatch"]["build"]["targets"]
    included = targets["sdist"]["force-include"]
    short = package.name.removeprefix("booster-")
    expected = {f"tests/{short}", "tests/conftest.py", "tests/shared", "pytest.ini"}
    assert expected <= set(included.values())
    assert {path.removeprefix("../../") for path in included} == set(included.values())
    assert [path for path in included if not (package / path).exists()] == []
