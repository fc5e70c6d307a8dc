"""Whether all ranks were built with the same settings: found before anything depends on it, and named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    every = coordinator.all_gather_object(printed_settings(settings), name="boost")
    found = differing_settings(every, range(len(every)))
    if found:
        msg = f"The ranks built their plugin with different settings: {'; '.join(found)}. Build it alike on every rank."
        raise ConfigError(msg)


def differing_settings(every: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Return which settings differ between ranks, and who has which value.

    Args:
        every: The settings of each rank, as `printed_settings` returns them.
        ranks: What these ranks are called.

    Collective: none.
    """
    found = []
    for name in dict.fromkeys(name for of_rank in every for name in of_rank):
        holders: dict[str, list[int]] = {}
        for rank, of_rank in zip(ranks, every, strict=True):
            holders.setdefault(of_rank.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(
                f"{_short(value)} on rank(s) {', '.join(map(str, who[:8]))}" for value, who in holders.items()
            )
            found.append(f"`{name}` is {values}")
    return found


def _short(value: str) -> str:
    return value if len(value) <= _MOST else f"{value[:_MOST]}..."


def printed_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by name as they are printed, those in dicts by names with dots.

    Args:
        settings: Values by name, dicts of them in dicts.
        prefix: What the names begin with.

    Collective: none.
    """
    printed = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            printed.update(printed_settings(value, f"{prefix}{name}."))
        else:
            printed[f"{prefix}{name}"] = repr(value)
    return printed
