"""What builds on ZeRO imports it by its two doors, and only names that they list."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

DOORS = ("booster_zero", "booster_zero.engine")


def imports_of(package):
    """Yield module and name of everything that a package's sources import from booster-zero."""
    (folder,) = importlib.import_module(package).__path__
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "booster_zero":
                for alias in node.names:
                    yield node.module, alias.name
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "booster_zero")


@pytest.mark.parametrize("package", ["booster_gemini", "booster_hybrid"])
def test_only_listed_names_of_the_doors_are_imported(package):
    found = set(imports_of(package))
    assert found
    listed = {(door, name) for door in DOORS for name in importlib.import_module(door).__all__}
    assert found <= listed


@pytest.mark.parametrize("door", DOORS)
def test_every_listed_name_is_there(door):
    module = importlib.import_module(door)
    assert all(hasattr(module, name) for name in module.__all__)
