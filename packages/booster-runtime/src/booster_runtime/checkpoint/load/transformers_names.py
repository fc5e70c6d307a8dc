"""The names that transformers gives to a model's tensors in files, where they are not those of its modules.

Since version 5, some models' modules are named differently from their published files, and transformers renames while
it reads and writes. Files with the modules' own names are fine with it, so only reading needs this. Tensors that it
would have to merge or split on the way (the experts of some mixtures) are not covered.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from booster_core.state import without_adapters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def renamed(module: nn.Module | None, keys: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Return for each tensor of a checkpoint the name that it has in the model, as far as transformers knows it.

    Args:
        module: The user's own model.
        keys: Names in the checkpoint.
        known: Names that the model has; these are never renamed.

    Returns:
        Name in the model to name in the checkpoint.

    Collective: none.
    """
    known_names = set(known)
    names = {key: key for key in keys}
    unknown = [key for key in names if key not in known_names]
    renamings = _renamings(module) if unknown else []
    if renamings:
        from transformers.core_model_loading import apply_renamings

        for key in unknown:
            name = apply_renamings(key, renamings)
            if name in known_names and name not in names:
                del names[key]
                names[name] = key
    return names


def _renamings(module: nn.Module | None) -> list[Any]:
    """Return transformers' renamings for a model of its own; nothing for others, and before its version 5."""
    if module is None or "transformers" not in sys.modules:
        return []
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:
        return []
    module = without_adapters(module)
    if not isinstance(module, PreTrainedModel):
        return []
    return [entry for entry in get_model_conversion_mapping(module) if isinstance(entry, WeightRenaming)]
