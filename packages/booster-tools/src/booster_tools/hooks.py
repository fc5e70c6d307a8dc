"""The functions of this distribution that do the work of arguments and methods of `Booster`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.plugin import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable


@hookimpl
def booster_method(name: str) -> Callable[..., Any] | None:
    """Choose a plugin for `Booster`."""
    if name in {"auto_plugin", "choose_plugin"}:
        from booster_tools.planning import automatic

        return automatic.auto_plugin if name == "auto_plugin" else automatic.choose_plugin
    return None
