"""ZeRO-3 in chunks, over a hierarchy of memories, as a plugin of Booster."""

from __future__ import annotations

from booster_gemini.config import GeminiConfig
from booster_gemini.plugin import GeminiPlugin

__all__ = ["GeminiConfig", "GeminiPlugin"]
