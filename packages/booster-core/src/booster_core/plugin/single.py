"""The default strategy: one process, one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from booster_core.errors import ConfigError
from booster_core.plugin.interface import SYNCHRONOUS_TRAINING, Boosted, Capability, Plugin, like
from booster_core.plugin.model import ModelWrapper
from booster_core.plugin.optimizer import OptimizerWrapper
from booster_core.plugin.scaling import GradientScaling
from booster_core.plugin.settings import place_model
from booster_core.ranks.environments import detect

if TYPE_CHECKING:
    from booster_core.plugin.interface import BoostContext
    from booster_core.precision import PrecisionPolicy


class SingleDevicePlugin(Plugin):
    """Trains on the device of this process alone; what ``Booster()`` uses when no plugin is chosen.

    Args:
        precision: Name or policy of the run's precision; the same as ``Booster(mixed_precision=...)``.

    Memory per step: parameters, gradients, optimizer state. Communication per step: none.
    """

    name: ClassVar[str] = "single"
    api_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = SYNCHRONOUS_TRAINING | {Capability.SEVERAL_OPTIMIZERS}
    needs_process_group: ClassVar[bool] = False

    def __init__(self, *, precision: PrecisionPolicy | str | None = None) -> None:
        self.precision = precision

    def supports_device(self, device_type: str) -> bool:
        """Return True: one process trains on any device of torch."""
        del device_type
        return True

    def configure(self, objects: Boosted, context: BoostContext) -> Boosted:
        """Move the model to the device and wrap it.

        Raises:
            ConfigError: If several ranks were launched, or several processes started by a launcher that would each
                train a model of their own.
        """
        world_size = context.coordinator.world_size
        if world_size > 1:
            msg = (
                f"`Booster()` without a plugin trains on one device, but {world_size} ranks were launched: each would "
                "train a model of its own. Choose a plugin, for example `Booster(plugin='ddp')`."
            )
            raise ConfigError(msg)
        if not torch.distributed.is_initialized():
            num_started = detect().world_size
            if num_started > 1:
                msg = (
                    "`Booster()` without a plugin trains on one device, but a launcher started "
                    f"{num_started} processes: each would train a model of its own. Call `booster_core.launch()` and "
                    "choose a plugin, for example `Booster(plugin='ddp')`, or start the script by `python`."
                )
                raise ConfigError(msg)
        place_model(objects.model, objects.optimizers, context.device, context.precision)
        model = ModelWrapper(objects.model, precision=context.precision)
        scaling = GradientScaling(context.precision)
        optimizers = [OptimizerWrapper(each, context=context, scaling=scaling) for each in objects.optimizers]
        return objects._replace(model=model, optimizer=like(objects.optimizer, optimizers))
