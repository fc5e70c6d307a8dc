"""Distributions import only each other's public packages, and a changed signature needs a changelog fragment."""

import ast

import public_api
import pytest
from matrix import matrix

PACKAGES = {name.replace("-", "_"): public_api.ROOT / "packages" / name / "src" for name in public_api.DISTRIBUTIONS}


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


@matrix(["booster_ddp", "booster_zero"], package=sorted(PACKAGES))
def test_other_distributions_are_imported_by_their_public_packages(package):
    private = [
        f"{place}: {module} {name}" for place, module, name in _foreign_imports(package) if not _is_public(module, name)
    ]
    assert not private


@matrix(["booster-ddp", "booster-zero"], distribution=public_api.DISTRIBUTIONS)
def test_a_changed_signature_is_in_a_changelog_fragment(distribution):
    before = public_api.snapshot_path(distribution).read_text(encoding="utf-8").splitlines()
    folder = public_api.ROOT / "packages" / distribution / "changelog.d"
    fragments = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md")))
    undeclared = public_api.undeclared_changes(before, public_api.exports(distribution), fragments)
    assert not undeclared, f"name these in a fragment in {folder}, in backticks"


def test_every_public_name_exists():
    missing = [
        line
        for distribution in public_api.DISTRIBUTIONS
        for line in public_api.exports(distribution)
        if ":" not in line and "(" not in line and "=" not in line
    ]
    assert not missing


BEFORE = ["booster_core.Booster.boost(self, model) -> Boosted", "booster_core.launch(rank: int) -> None"]


@pytest.mark.parametrize(
    ("after", "fragments", "undeclared"),
    [
        (BEFORE, "", []),
        (BEFORE[:1], "", [BEFORE[1]]),
        (BEFORE[:1], "`launch` is gone; call `launch_from_torch`.", []),
        (BEFORE[:1], "launch is gone", [BEFORE[1]]),
        ([BEFORE[0].replace("model", "module"), BEFORE[1]], "`Booster.boost` takes `module`.", []),
        (
            [*BEFORE, "booster_core.Booster.plan(self) -> None"],
            "`launch` is quicker.",
            ["booster_core.Booster.plan(self) -> None"],
        ),
    ],
    ids=["same", "removed", "removed-declared", "not-in-backticks", "changed-declared", "added"],
)
def test_changes_that_no_fragment_names_are_found(after, fragments, undeclared):
    assert public_api.undeclared_changes(BEFORE, after, fragments) == undeclared
