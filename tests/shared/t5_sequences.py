"""Split sequences of T5, whose layers attend by torch's function since transformers 5.15: before, each rank refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def run_or_refused(function: Callable[..., Any], name: str, options: dict[str, Any], *arguments: Any) -> Any:
    """Call ``function(name, options, *arguments)``, on a rank; see that it is refused where T5's layers can't be split.

    Args:
        function: Trains a model with the options.
        name: The model's name; that of T5 has it as a part.
        options: Of `HybridParallelPlugin`.
        *arguments: Further arguments.
    """
    from transformers import T5PreTrainedModel

    splits_attention = options.get("sequence_parallelism_mode") in ("all_to_all", "ring_attn")
    if "t5" not in name or not splits_attention or getattr(T5PreTrainedModel, "_supports_sdpa", False):
        return function(name, options, *arguments)
    refused = r"changes what \w+ computes: on a part of a sequence it fails"
    with pytest.raises(ConfigError, match=f"{refused}|computes with its attention mask itself"):
        function(name, options, *arguments)
    return None
