"""Each distribution declares what it imports, and imports what it declares."""

import ast
import re
import sys
from pathlib import Path

import nox
import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
OPTIONAL = {"bitsandbytes", "botocore", "huggingface_hub", "mlflow", "peft", "torchao", "transformers", "wandb"}
"""Imported only where a user's own model, call or settings need them."""
UNIMPORTED = {"booster-runtime": {"booster_checkpoint"}, "booster-ft": {"booster_ddp", "numpy"}}
"""What a distribution needs without importing it: found by an entry point, or by torch (`Tensor.numpy`)."""


def _normalized(requirement):
    return re.split(r"[<>=\[; ]", requirement)[0].replace("-", "_").lower()


def _for_types_only(tree):
    """Return the nodes under `if TYPE_CHECKING`."""
    conditions = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    bodies = [node.body for node in conditions if getattr(node.test, "id", None) == "TYPE_CHECKING"]
    return {inner for body in bodies for statement in body for inner in ast.walk(statement)}


def _imported(folder):
    """Return the modules that sources in a folder import at run time, also inside of functions."""
    names = set()
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skipped = _for_types_only(tree)
        for node in ast.walk(tree):
            if node not in skipped and isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif node not in skipped and isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_what_is_imported_is_declared(package):
    project = nox.project.load_toml(package / "pyproject.toml")["project"]
    declared = set(map(_normalized, project["dependencies"]))
    extras = {_normalized(each) for extra in project.get("optional-dependencies", {}).values() for each in extra}
    imported = _imported(package / "src") - {package.name.replace("-", "_")}
    lazily = {"booster_runtime"} if package.name == "booster-core" else set()
    assert sorted(imported - declared - extras - OPTIONAL - lazily) == []
    assert sorted(declared - imported - UNIMPORTED.get(package.name, set())) == []
