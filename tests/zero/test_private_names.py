"""What packages use of torch beyond its public interface is listed, and checked when they are imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import booster_runtime
import booster_zero
from booster_runtime import torch_private as of_runtime
from booster_zero import torch_private as of_zero

if TYPE_CHECKING:
    from collections.abc import Iterator


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names of torch with a private part that a file uses, as far as they can be read from it."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known.update((each.asname or "torch", each.name if each.asname else "torch") for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            known.update((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
    for node in ast.walk(tree):  # such as ``private = torch._C``
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Attribute, ast.Name)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known.update((each.id, dotted(node.value, known)) for each in targets if isinstance(each, ast.Name))
    used = [*known.values(), *(dotted(node, known) for node in ast.walk(tree) if isinstance(node, ast.Attribute))]
    for name in used:
        found = re.match(r"torch\.(.*\b_[a-zA-Z]\w*)", name or "")
        if found and not name.endswith("._C"):
            yield found[1]


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, known)
        return inner and f"{inner}.{node.attr}"
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(("package", "table"), [(booster_runtime, of_runtime), (booster_zero, of_zero)])
def test_all_private_names_of_torch_are_listed(package, table):
    sources = Path(package.__file__).parent.rglob("*.py")
    used = {name for path in sources for name in names_in(ast.parse(path.read_text(encoding="utf-8")))}
    assert len(used) > 5
    listed = set(table.NAMES)
    assert {name for name in used if not any(f"{each}.".startswith(f"{name}.") for each in listed)} == set()


def test_a_torch_without_a_name_is_told_by_name():
    match = rf"booster-x does not know torch {re.escape(torch.__version__)}, which has no torch\._C\._gone\. Use"
    with pytest.raises(ImportError, match=match):
        of_runtime.check_names("booster-x", ["_C._ExcludeDispatchKeyGuard", "_C._gone"])
