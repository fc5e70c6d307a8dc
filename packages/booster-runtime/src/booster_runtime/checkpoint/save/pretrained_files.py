"""The small files that Hugging Face libraries expect next to a model's weights."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from booster_core.state import own_class, without_adapters

if TYPE_CHECKING:
    import torch
    from torch import nn


def pretrained_files(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, str]:
    """Return ``config.json`` and ``generation_config.json`` of a model that has them, by name.

    Args:
        model: The user's own model. It is not changed.
        dtype: The dtype that its weights are written in, where it is not their own.

    Collective: none.
    """
    files = {}
    model = without_adapters(model)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        config = copy.deepcopy(config)
        if hasattr(config, "architectures"):
            config.architectures = [own_class(model).__name__]
            floating = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
            kept = dtype or (floating[0] if floating else None)
            if kept is not None:
                config.dtype = str(kept).removeprefix("torch.")
        files["config.json"] = config.to_json_string()
    elif isinstance(config, dict) and hasattr(model, "save_config"):  # diffusers
        content = {**config, "_class_name": own_class(model).__name__}
        files["config.json"] = json.dumps(content, indent=2, sort_keys=True, default=str) + "\n"
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string") and getattr(model, "can_generate", lambda: False)():
        files["generation_config.json"] = generation.to_json_string()
    return files
