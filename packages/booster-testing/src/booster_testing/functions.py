"""The tests of `PluginConformance` as functions, for a test file with a fixture ``plugin`` in place of a class.

A plugin's whole test file::

    from functools import partial

    import pytest
    from booster_testing.functions import *
    from booster_local_sgd import LocalSGDPlugin


    @pytest.fixture
    def plugin():
        return partial(LocalSGDPlugin, sync_every=2)

The fixture returns the plugin's class, or a ``partial`` of it with options. What else a class may say (the number of
ranks, a device, a model) takes the class.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from booster_testing.conformance import PluginConformance

if TYPE_CHECKING:
    from collections.abc import Callable

    from booster_core.plugin import Plugin

_latest: list[PluginConformance] = []
"""The case of the plugin that was tested last, whose ranks stay open while it is the same."""


def _case_of(plugin: type[Plugin] | partial[Plugin]) -> PluginConformance:
    call = plugin if isinstance(plugin, partial) else partial(plugin)
    wanted = {"plugin_class": call.func, "options": call.keywords}
    if not _latest or any(getattr(_latest[0], name) != value for name, value in wanted.items()):
        _latest[:] = [type("Conformance", (PluginConformance,), wanted)()]
    return _latest[0]


def _as_function(name: str, method: Callable[..., None]) -> Callable[..., None]:
    def test(*, plugin: type[Plugin] | partial[Plugin], **arguments: Any) -> None:
        __tracebackhide__ = True
        getattr(_case_of(plugin), name)(**arguments)

    own = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY)
    others = list(inspect.signature(method).parameters.values())[1:]
    marked: Any = test
    marked.__name__ = marked.__qualname__ = name
    marked.__signature__ = inspect.Signature([*others, own])  # which pytest reads
    marked.pytestmark = getattr(method, "pytestmark", [])
    return test


_TESTS = {name: method for name, method in inspect.getmembers(PluginConformance) if name.startswith("test_")}
globals().update({name: _as_function(name, method) for name, method in _TESTS.items()})
__all__ = [*_TESTS]  # noqa: PLE0604 - names
