"""Test classes that call functions on the ranks of one open group, and remember what they return."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from booster_testing.ranks import Ranks, run_on_ranks
from booster_testing.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from booster_core.plugin import Capability, Plugin

_TIMEOUT_SECONDS = 300.0


class RankTestCase:
    """Calls functions for a plugin's test class."""

    plugin_class: ClassVar[type[Plugin]]
    options: ClassVar[Mapping[str, Any]]
    world_size: ClassVar[int]
    device: ClassVar[str]
    backend: ClassVar[str]
    make_model: ClassVar[Callable[[], nn.Module] | None]
    prepare: ClassVar[Callable[[], None] | None]
    opened: ClassVar[Ranks]
    results: ClassVar[dict[Any, Any]]

    def training(self, **changes: Any) -> Training:
        """Return the training that the ranks run."""
        settings = {"model_factory": type(self).make_model, "device": self.device, **changes}
        return Training(plugin_class=self.plugin_class, options=self.options, **settings)

    def needs(self, *capabilities: Capability) -> None:
        """Skip the test if the plugin does not declare all of the capabilities."""
        missing = [c.value for c in capabilities if c not in self.plugin_class.capabilities]
        if missing:
            pytest.skip(f"{self.plugin_class.__name__} does not declare {', '.join(missing)}")

    def on_ranks(self, function: Callable[..., Any], *arguments: Any, again: bool = False, **changes: Any) -> list[Any]:
        """Return ``function(training, *arguments)`` by rank, for a training with changes; remembered for the class.

        Args:
            function: At a module's top level; see `booster_testing.run_on_ranks`.
            *arguments: What else it gets.
            again: Ask for a second call with the same arguments, which is remembered too.
            **changes: Settings of the training that differ from the class's.

        Raises:
            RankError: If it raised on some rank.
        """
        __tracebackhide__ = True
        key = function, arguments, again, *sorted(changes.items())
        results: list[Any] = self.remembered(key, partial(self.call, function, self.training(**changes), *arguments))
        return results

    def raises(
        self, error: type[Exception], match: str, function: Callable[..., Any], *arguments: Any, **changes: Any
    ) -> None:
        """Assert that ``function(training, *arguments)`` raises an error on every rank, with a message that matches."""
        __tracebackhide__ = True
        self.ranks().expect(error, match, function, self.training(**changes), *arguments)

    def call(self, function: Callable[..., Any], *arguments: Any, world_size: int | None = None) -> list[Any]:
        """Call ``function(*arguments)`` on every rank and return the results; other sizes get a new group."""
        __tracebackhide__ = True
        if world_size in (None, self.world_size):
            return self.ranks().call(function, *arguments, timeout_seconds=_TIMEOUT_SECONDS)
        settings: dict[str, Any] = {"backend": self.backend, "prepare": type(self).prepare}
        return run_on_ranks(function, world_size or 1, *arguments, timeout_seconds=_TIMEOUT_SECONDS, **settings)

    def ranks(self) -> Ranks:
        """Return the ranks of this class; their group closes with the next call on others."""
        kit = type(self)
        if "opened" not in vars(kit):
            kit.opened = Ranks(self.world_size, backend=self.backend, prepare=kit.prepare)
        return kit.opened

    def remembered(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned when this class asked for the key first."""
        __tracebackhide__ = True
        kit = type(self)
        if "results" not in vars(kit):
            kit.results = {}
        if key not in kit.results:
            kit.results[key] = make()
        return kit.results[key]
