"""One process, one device, with what booster-runtime has for every strategy; core's own plugin has less of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from booster_core.plugin import Capability, SingleDevicePlugin, hookimpl
from booster_runtime.strategy import STRATEGY_TRAINING, Strategy

if TYPE_CHECKING:
    from booster_core.plugin import BoostContext, Boosted, Plugin
    from booster_runtime.lazy.recording import Recording


class SingleDeviceStrategy(Strategy, SingleDevicePlugin):
    """Trains on the device of this process alone; what ``Booster()`` uses where booster-runtime is installed."""

    api_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = SingleDevicePlugin.capabilities | STRATEGY_TRAINING

    def shard(self, objects: Boosted, context: BoostContext, values: Recording | None) -> Boosted:
        """Move the model to the device and wrap it."""
        del values
        return SingleDevicePlugin.configure(self, objects, context)


@hookimpl
def booster_plugins() -> list[type[Plugin]]:
    """List the plugin of this module."""
    return [SingleDeviceStrategy]
