"""Split sequences of T5, whose layers attend by torch's function since transformers 5.15: before, each rank refuses."""

import pytest

from booster_core.errors import ConfigError

REFUSED = r"changes what \w+ computes: on a part of a sequence it fails|computes with its attention mask itself"


def is_refused(name, options):
    """Return whether a model is a T5 whose layers the options can't split."""
    from transformers import T5PreTrainedModel

    splits_attention = options.get("sequence_parallelism_mode") in ("all_to_all", "ring_attn")
    return "t5" in name and splits_attention and not getattr(T5PreTrainedModel, "_supports_sdpa", False)


def run_or_refused(function, name, options, *arguments):
    """Call ``function(name, options, *arguments)``, on a rank; see that it is refused where T5's layers can't be split.

    Args:
        function: Trains a model with the options.
        name: The model's name; that of T5 has it as a part.
        options: Of `HybridParallelPlugin`.
        *arguments: Further arguments.
    """
    if not is_refused(name, options):
        return function(name, options, *arguments)
    with pytest.raises(ConfigError, match=REFUSED):
        function(name, options, *arguments)
    return None
