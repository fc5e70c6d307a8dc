"""Writing gradients by hand, between backward and the step."""

from __future__ import annotations

from booster_core.errors import ConfigError


def not_optimized(name: str) -> ConfigError:
    """Return the error for a gradient that the boosted optimizer does not step with."""
    return ConfigError(
        f"The gradient of '{name}' can't be set: the boosted optimizer does not hold the parameter. Pass the optimizer "
        "with the model to `boost`, and list the parameter in it."
    )
