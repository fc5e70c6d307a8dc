"""Ranks and what they share: launching them, the default process group, and who waits where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.lazy_import import public_names

if TYPE_CHECKING:
    from booster_core.ranks.coordinator import DistCoordinator
    from booster_core.ranks.environments import Environment
    from booster_core.ranks.host import Host, this_host
    from booster_core.ranks.rendezvous import LOST_PEER, PROGRESS, name_ranks, naming_missing_ranks
    from booster_core.ranks.world import Monitor, World, close_world, current_world, open_world, opened_world, set_world

__all__ = [
    "LOST_PEER",
    "PROGRESS",
    "DistCoordinator",
    "Environment",
    "Host",
    "Monitor",
    "World",
    "close_world",
    "current_world",
    "name_ranks",
    "naming_missing_ranks",
    "open_world",
    "opened_world",
    "set_world",
    "this_host",
]

__getattr__, __dir__ = public_names(
    __name__,
    {
        ".coordinator": ["DistCoordinator"],
        ".environments": ["Environment"],
        ".host": ["Host", "this_host"],
        ".rendezvous": ["LOST_PEER", "PROGRESS", "name_ranks", "naming_missing_ranks"],
        ".world": ["Monitor", "World", "close_world", "current_world", "open_world", "opened_world", "set_world"],
    },
)
