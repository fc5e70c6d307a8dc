"""Where chunks are and when they move, decided from a recorded step; pure functions without ranks or tensors.

Authors of placement policies import from here.
"""

from __future__ import annotations

from booster_gemini.placement.policy import Event, Kind, Moves, PlacementPolicy, Request

__all__ = ["Event", "Kind", "Moves", "PlacementPolicy", "Request"]
