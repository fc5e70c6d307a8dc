"""Packages whose public names are imported when they are first used, so that importing one costs next to nothing."""

from __future__ import annotations

import ast
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["public_names"]


def public_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that imports its public names on first use.

    The names, and the modules that they are in, are those that its source imports ``if TYPE_CHECKING``.

    Args:
        package: The package's own ``__name__``.
    """
    module: Any = sys.modules[package]
    source = ast.parse(module.__spec__.loader.get_source(package))
    blocks = [each for each in source.body if isinstance(each, ast.If)]
    imports = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
    homes = {alias.name: str(each.module) for each in imports for alias in each.names}

    def get(name: str) -> object:
        if name not in homes:
            msg = f"module '{package}' has no attribute '{name}'"
            raise AttributeError(msg)
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *homes})

    return get, names
