"""Whether all ranks were built with the same settings: found before anything depends on it, and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from booster_core.ranks import DistCoordinator

_MOST = 100
"""Characters of a value that a message shows."""


def check_same_settings(settings: Mapping[str, Any], coordinator: DistCoordinator) -> None:
    """Raise on every rank if one was given another value of a setting.

    Args:
        settings: Values by name, dicts of them in dicts; each is compared as it is printed.
        coordinator: Tells what the other ranks have.

    Raises:
        ConfigError: Naming the settings, and which ranks have which value.

    Collective: every rank of the world.
    """
    every = coordinator.all_gather_object(_printed(settings), name="boost")
    found = []
    for name in dict.fromkeys(name for of_rank in every for name in of_rank):
        ranks: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(every):
            ranks.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(
                f"{_short(value)} on rank(s) {', '.join(map(str, who[:8]))}" for value, who in ranks.items()
            )
            found.append(f"`{name}` is {values}")
    if found:
        msg = f"The ranks built their plugin with different settings: {'; '.join(found)}. Build it alike on every rank."
        raise ConfigError(msg)


def _short(value: str) -> str:
    return value if len(value) <= _MOST else f"{value[:_MOST]}..."


def _printed(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    printed = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            printed.update(_printed(value, f"{prefix}{name}."))
        else:
            printed[f"{prefix}{name}"] = repr(value)
    return printed
