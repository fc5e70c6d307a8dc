"""Parameters that are two objects over one memory: sharding would untie them without a word, so it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def check_distinct_memory(parameters: Mapping[int, nn.Parameter], names: Mapping[int, str]) -> None:
    """Check that no two parameters begin at the same place in memory.

    Args:
        parameters: By number.
        names: Their names, by number.

    Raises:
        ConfigError: Naming two that do.

    Collective: none.
    """
    addresses: dict[object, int] = {}
    for index, parameter in parameters.items():
        if not parameter.numel():
            continue
        storage = parameter.untyped_storage().data_ptr() + parameter.storage_offset() * parameter.element_size()
        other = addresses.setdefault((storage, parameter.device), index)
        if other != index:
            msg = (
                f"Parameters '{names[other]}' and '{names[index]}' are two objects over the same memory. Tie them by "
                "assigning one Parameter to both modules."
            )
            raise ConfigError(msg)
