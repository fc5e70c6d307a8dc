"""The packages of this repository, what each depends on, and which of them a change touches."""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PROSE = {".md", ".svg", ".png", ".css"}
"""Files that only the documentation's tests read."""


def project(name: str, root: Path = ROOT) -> dict[str, Any]:
    """Return the table ``project`` of a package's ``pyproject.toml``."""
    return dict(read_toml(root / "packages" / name / "pyproject.toml")["project"])


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file says."""
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def requirement_name(requirement: str) -> str:
    """Return the name of the distribution in a requirement such as ``booster-core>=0.1,<0.2``."""
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]


def own_dependencies(name: str) -> list[str]:
    """Return the packages of this repository that a package depends on directly."""
    return [each for each in map(requirement_name, project(name)["dependencies"]) if each in PACKAGES]


def with_dependents(names: Iterable[str]) -> list[str]:
    """Return packages and all that depend on them, directly or through others, sorted by name."""
    found = set(names)
    while more := {each for each in PACKAGES if each not in found and found.intersection(own_dependencies(each))}:
        found |= more
    return sorted(found)


def touched(paths: Iterable[str]) -> list[str]:
    """Return the packages whose tests a change of files calls for.

    Sources touch their package and all that depend on it; tests and fragments of a package touch that package alone.
    Prose touches none, because the session ``docs`` always runs. Any other file touches every package: settings,
    constraints, and code that the tests share.
    """
    changed: set[str] = set()
    alone: set[str] = set()
    for path in map(PurePosixPath, paths):
        parts = path.parts
        if parts[0] == "packages" and len(parts) > 2 and parts[1] in PACKAGES:
            if parts[2] in {"src", "pyproject.toml"}:
                changed.add(parts[1])
            else:
                alone.add(parts[1])
        elif parts[0] == "tests" and len(parts) > 2 and f"booster-{parts[1]}" in PACKAGES:
            alone.add(f"booster-{parts[1]}")
        elif path.suffix not in PROSE and parts[0] not in {"benchmarks", "docs", "examples", "LICENSE"}:
            changed.update(PACKAGES)
    return sorted({*with_dependents(changed), *alone})
