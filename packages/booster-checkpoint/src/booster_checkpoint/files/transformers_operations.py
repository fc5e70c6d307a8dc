"""transformers' weight conversions, done on layouts instead of tensors.

Since version 5, transformers holds the experts of a mixture in one tensor, and its files hold them one by one, as
published. It describes how by `WeightConverter` objects: patterns of names, and operations that merge, split or
transpose. Those that move boxes around are done here by index arithmetic; others (permuting for rotary embeddings) are
not known here. Scripts register their own by transformers' ``register_checkpoint_conversion_mapping``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.composed import Layout, chunks, concatenate, stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_KNOWN = ("MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Transpose")


def pretrained_model(module: nn.Module | None) -> Any:
    """Return a module that is a model of transformers, at least version 5; ``None`` for others."""
    if module is None or "transformers" not in sys.modules:
        return None
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return None
    del get_model_conversion_mapping, WeightConverter  # asked for to know that they are there
    return module if isinstance(module, PreTrainedModel) else None


def is_known(converter: Any) -> bool:
    """Return whether all operations of a ``WeightConverter`` can be done on layouts."""
    return all(
        type(operation).__name__ in _KNOWN
        and getattr(operation, "num_shards_attribute", None) is None
        and not getattr(operation, "check_dims", False)
        for operation in converter.operations
    )


def convert(converter: Any, name: str, collected: dict[str, list[Layout]]) -> dict[str, Layout]:
    """Return what ``WeightConverter.convert`` returns, of layouts.

    Args:
        converter: One whose operations are known.
        name: The name that ``rename_source_key`` gave to the tensors.
        collected: The tensors for each of the converter's source patterns, in the order of their names.

    Raises:
        CheckpointError: If tensors don't fit together.
        ValueError: If the operations are not meant for these patterns.
    """
    made: dict[str, list[Layout]] = collected
    for operation in converter.operations:
        made = _apply(operation, made, converter.source_patterns, converter.target_patterns)
    full_name = name.replace("*.", "0.")
    for pattern in made:
        if pattern in full_name:
            prefix, _, suffix = full_name.partition(pattern)
            return {f"{prefix}{target}{suffix}": layout for target, (layout,) in made.items()}
    return {target: layout for target, (layout,) in made.items()}


def _apply(
    operation: Any, made: dict[str, list[Layout]], sources: Sequence[str], targets: Sequence[str]
) -> dict[str, list[Layout]]:
    """Do one operation; names are patterns until the last one is done."""
    kind = type(operation).__name__
    if kind == "Transpose":
        ((whole,),) = made.values()
        if len(targets) > 1 < len(sources):
            msg = "a transposition of several tensors"
            raise ValueError(msg)
        return {(targets if len(targets) == 1 else sources)[0]: [whole.transpose(operation.dim0, operation.dim1)]}
    dim = operation.dim
    if kind == "MergeModulelist":
        return {targets[0] if len(made) == 1 else source: [stack(found, dim)] for source, found in made.items()}
    if kind == "Concatenate":
        return {targets[0]: [concatenate([layout for source in sources for layout in made.get(source, [])], dim)]}
    if kind == "Chunk":
        ((whole,),) = made.values()
        return {target: [part] for target, part in zip(targets, chunks(whole, len(targets), dim), strict=True)}
    split = {}
    for source, (whole,) in made.items():
        pattern = targets[0] if len(made) == 1 else source
        for index in range(whole.meta.shape[dim]):
            split[pattern.replace("*", str(index))] = [whole.select(dim, index)]
    return split
