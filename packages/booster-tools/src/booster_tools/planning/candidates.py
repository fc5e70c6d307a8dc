"""Which settings of which plugins a plan compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from booster_core.errors import ConfigError, PluginError
from booster_core.plugin import installed, load
from booster_core.run_settings import RunSettings
from booster_tools.rehearsal import check_trains_alone

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    from booster_core.plugin import Plugin


@runtime_checkable
class ComparesSettings(Protocol):
    """A plugin class that says which of its settings are worth comparing. Others are planned with their defaults."""

    def settings_to_plan(self, world_size: int) -> list[dict[str, Any]]:
        """Return arguments of the constructor, most usual first."""


@runtime_checkable
class Offloads(Protocol):
    """A plugin that can keep state elsewhere than on the device. Plans of one that does are refused."""

    def offloading(self) -> str | None:
        """Return the option that makes it do so, such as ``"offload='cpu'"``; ``None`` where none does."""


@runtime_checkable
class HasPipeline(Protocol):
    """A plugin that can cut models into stages, whose costs are derived from those of the whole model on one of them.

    A plan trains on ``world_size // num_stages`` ranks under the plugin that `without_pipeline` returns.
    """

    def without_pipeline(self, world_size: int) -> tuple[Plugin, int] | None:
        """Return a plugin with the same options and no pipeline, and the number of stages; ``None`` if it has none."""

    def microbatches(self, batch: Any) -> list[Any]:
        """Return the parts into which a batch is cut."""

    def pipeline_costs(self, num_microbatches: int) -> tuple[float, float]:
        """Return which part of a step a rank waits, and the most microbatches whose activations one keeps."""


@runtime_checkable
class LooksAtValues(Protocol):
    """A plugin that decides by values of tensors, such as by trying the user's layers before it splits them."""

    def without_values(self) -> AbstractContextManager[str | None]:
        """Return a context in which it goes on without them, as in a plan; entering it tells what is assumed."""


def check_plannable(plugin: Plugin) -> None:
    """Check that a plugin keeps everything on the device, and trains with nobody else than its ranks.

    Raises:
        ConfigError: If it offloads, or waits for other launches.
    """
    check_trains_alone(plugin)
    option = plugin.offloading() if isinstance(plugin, Offloads) else None
    if option is not None:
        msg = (
            f"Plugin '{plugin.name}' with `{option}` can't be planned: a plan runs on the host, where nothing is moved "
            "off the device, so that it can't tell what stays there. Plan without it."
        )
        raise ConfigError(msg)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plugin with some of its options.

    Args:
        name: Name of an installed plugin.
        options: Arguments of its constructor.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Plugin:
        """Return the plugin.

        Raises:
            PluginError: If it can't be loaded.
            ConfigError: If it refuses the options.
        """
        return load(self.name)(**self.options)

    def settings(self, mixed_precision: str | None = None) -> RunSettings:
        """Return what `booster run` takes to run a script with this setting."""
        return RunSettings(plugin=self.name, options=dict(self.options), precision=mixed_precision)

    def code(self, mixed_precision: str | None = None) -> str:
        """Return the line of a script that makes the Booster, and the import that it needs."""
        plugin = load(self.name)
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        precision = "" if mixed_precision is None else f", mixed_precision={mixed_precision!r}"
        if not arguments:
            return f'booster = Booster(plugin="{self.name}"{precision})'
        package = plugin.__module__.partition(".")[0]
        made = f"booster = Booster(plugin={plugin.__name__}({arguments}){precision})"
        return f"from {package} import {plugin.__name__}\n{made}"

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({arguments})"


def candidates(world_size: int, names: Iterable[str] | None = None) -> list[Candidate]:
    """Return the settings to compare, of all installed plugins or of some.

    Raises:
        PluginError: If a plugin that is named can't be loaded; of all installed ones, those are left out.
    """
    found = []
    for name in sorted(listing.name for listing in installed()) if names is None else list(names):
        try:
            plugin = load(name)
        except PluginError:
            if names is not None:
                raise
            continue
        asked: list[dict[str, Any]] = [{}]
        if isinstance(plugin, ComparesSettings):
            asked = cast("ComparesSettings", plugin).settings_to_plan(world_size)
        found += [Candidate(name=name, options=options) for options in asked]
    return found
