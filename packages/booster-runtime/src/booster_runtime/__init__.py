"""The toolkit that strategies are made of: collectives, sharding, data, lazy models, the monitor, adapters.

The names of this package are for users. Its sub-packages are for authors of strategies, and may change with each minor
version. Public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.lazy_import import public_names

if TYPE_CHECKING:
    from booster_runtime.activations import disable_activation_checkpointing, enable_activation_checkpointing
    from booster_runtime.lazy import LazyInitContext
    from booster_runtime.stop_signal import StopSignal

__all__ = [
    "LazyInitContext",
    "StopSignal",
    "disable_activation_checkpointing",
    "enable_activation_checkpointing",
]

__getattr__, __dir__ = public_names(
    __name__,
    {
        ".activations": ["disable_activation_checkpointing", "enable_activation_checkpointing"],
        ".lazy": ["LazyInitContext"],
        ".stop_signal": ["StopSignal"],
    },
)
