"""transformers' ``Trainer``, and trainers that derive from it such as TRL's, under any plugin of a Booster."""

from __future__ import annotations

from booster_core.errors import ConfigError

try:
    import accelerate as _accelerate  # noqa: F401 - the Trainer needs it
    import transformers as _transformers  # noqa: F401
except ImportError as _error:
    _MSG = f"The Trainer needs transformers and accelerate ({_error}). Run `pip install 'booster-tools[trainer]'`."
    raise ConfigError(_MSG) from _error

from booster_tools.integrations.transformers.trainer import BoosterTrainer, with_booster

__all__ = ["BoosterTrainer", "with_booster"]
