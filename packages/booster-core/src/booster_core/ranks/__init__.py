"""Ranks and what they share: launching them, the default process group, and who waits where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.lazy_import import public_names

if TYPE_CHECKING:
    from booster_core.errors import name_ranks
    from booster_core.ranks.calls import (
        LOST_PEER,
        OBSERVERS,
        NamedCall,
        ObservedCall,
        Observer,
        observed_by,
        refuse_capture,
    )
    from booster_core.ranks.coordinator import DistCoordinator, Together
    from booster_core.ranks.digests import digest
    from booster_core.ranks.environments import Environment, accelerator, choose_backend, describe_devices
    from booster_core.ranks.launch import ensure_process_group, seed_everything
    from booster_core.ranks.meeting import Meetings, Outcome
    from booster_core.ranks.store import Host, this_host
    from booster_core.ranks.world import (
        PROGRESS,
        Monitor,
        World,
        close_world,
        current_world,
        group_options,
        let_monitor_speak_first,
        nccl_margin_seconds,
        open_world,
        opened_world,
        run_in_turns,
        set_world,
    )

__all__ = [
    "LOST_PEER",
    "OBSERVERS",
    "PROGRESS",
    "DistCoordinator",
    "Environment",
    "Host",
    "Meetings",
    "Monitor",
    "NamedCall",
    "ObservedCall",
    "Observer",
    "Outcome",
    "Together",
    "World",
    "accelerator",
    "choose_backend",
    "close_world",
    "current_world",
    "describe_devices",
    "digest",
    "ensure_process_group",
    "group_options",
    "let_monitor_speak_first",
    "name_ranks",
    "nccl_margin_seconds",
    "observed_by",
    "open_world",
    "opened_world",
    "refuse_capture",
    "run_in_turns",
    "seed_everything",
    "set_world",
    "this_host",
]

__getattr__, __dir__ = public_names(__name__)
