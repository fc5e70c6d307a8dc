"""The names that transformers gives to a model's tensors in files, where they are not those of its modules.

Since version 5, some models' modules are named differently from their published files, and transformers renames,
merges and splits while it reads and writes. Files with the modules' own names are fine with it, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.transformers_operations import convert, is_known, pretrained_model
from booster_core.errors import CheckpointError
from booster_core.state import without_adapters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from booster_checkpoint.files.composed import Layout


def converted(module: nn.Module | None, stored: Mapping[str, Layout], known: Iterable[str]) -> dict[str, Layout]:
    """Return a checkpoint's tensors by the names that they have in the model, as far as transformers knows these.

    Args:
        module: The user's own model.
        stored: The tensors by their names in the checkpoint.
        known: Names that the model has; these are never renamed.

    Raises:
        CheckpointError: If tensors that make up one of the model don't fit together.
    """
    known_names = set(known)
    named = dict(stored)
    model = None if module is None else pretrained_model(without_adapters(module))
    if model is None or all(name in known_names for name in stored):
        return named
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for key in sorted((key for key in stored if key not in known_names), key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters)
        if name not in known_names or name in named:
            continue
        if pattern is None:
            named[name] = named.pop(key)
        elif is_known(converter_of[pattern]):
            groups.setdefault(name, (converter_of[pattern], {}))[1].setdefault(pattern, []).append(key)
    for name, (converter, keys) in groups.items():
        try:
            made = convert(converter, name, {at: [stored[key] for key in found] for at, found in keys.items()})
        except ValueError as error:
            msg = f"'{name}' can't be made of {len(keys)} kinds of tensors as transformers describes it: {error}."
            raise CheckpointError(msg) from error
        for found in keys.values():
            for key in found:
                del named[key]
        named |= made
    return named
