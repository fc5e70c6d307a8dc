"""Split sequences of T5, whose layers attend by torch's function since transformers 5.15: before, each rank refuses."""

REFUSED = r"changes what \w+ computes: on a part of a sequence it fails|computes with its attention mask itself"


def is_refused(name, options):
    """Return whether a model is a T5 whose layers the options can't split."""
    from transformers import T5PreTrainedModel

    splits_attention = options.get("sequence_parallelism_mode") in ("all_to_all", "ring_attn")
    return "t5" in name and splits_attention and not getattr(T5PreTrainedModel, "_supports_sdpa", False)
