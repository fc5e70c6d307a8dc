"""Distributions import only each other's public packages, those that state `__all__`."""

import ast
import builtins
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {path.parent.name.replace("-", "_"): path.parent / "src" for path in ROOT.glob("packages/*/pyproject.toml")}


def _exports(module):
    """Return the names in a module's `__all__`, or nothing where it states none."""
    base = PACKAGES[module.split(".")[0]].joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return set(ast.literal_eval(node.value))
    return None


def _foreign_imports(package):
    """Yield each import of another distribution of ours, those within functions and for types included."""
    for path in sorted((PACKAGES[package] / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [(alias.name, None) for alias in node.names]
            else:
                continue
            for module, name in modules:
                if module.split(".")[0] in PACKAGES.keys() - {package}:
                    yield f"{path.name}:{node.lineno}", module, name


def _is_public(module, name):
    exported = _exports(module)
    if name is None:
        return exported is not None
    inner = f"{module}.{name}"
    return name in (exported or ()) or (_exports(inner) is not None)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_other_distributions_are_imported_by_their_public_packages(package):
    private = [
        f"{place}: {module} {name}" for place, module, name in _foreign_imports(package) if not _is_public(module, name)
    ]
    assert not private


def test_errors_that_pages_name_are_in_the_public_door():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "packages").glob("*/README.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"`(?:booster_core\.errors\.)?([A-Z]\w+Error)`", page.read_text(encoding="utf-8"))
    }
    ours = {name for name in named if not hasattr(builtins, name)}
    assert ours <= _exports("booster_core.errors")
    assert "BudgetError" in ours, "pages name errors"
