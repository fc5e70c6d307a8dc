"""Packages whose public names are imported when they are first used, so that importing one costs next to nothing."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["public_names"]


def public_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that imports its public names on first use.

    Args:
        package: The package's own ``__name__``.
        modules: Which names each module defines, by the module's name: whole, or relative as in ``".interface"``.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name not in homes:
            msg = f"module '{package}' has no attribute '{name}'"
            raise AttributeError(msg)
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
