"""Lightning Fabric's loop under any plugin of a Booster."""

from __future__ import annotations

from booster_core.errors import ConfigError

try:
    import lightning_fabric as _fabric  # noqa: F401 - the strategy needs it
except ImportError as _error:
    _MSG = f"The strategy needs Lightning Fabric ({_error}). Run `pip install 'booster-tools[fabric]'`."
    raise ConfigError(_MSG) from _error

from booster_tools.integrations.fabric.strategy import BoosterStrategy

__all__ = ["BoosterStrategy"]
