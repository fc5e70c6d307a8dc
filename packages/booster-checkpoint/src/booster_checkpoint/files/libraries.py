"""Which library's ``from_pretrained`` reads a model, and by which names; told without importing any."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, cast

from booster_checkpoint.files.names import DIFFUSERS, MODEL, SAFETENSORS, TORCH, TORCH_MODEL, FileNames
from booster_core.state import own_class

if TYPE_CHECKING:
    from torch import nn

_BASES = {"PreTrainedModel": "transformers", "ModelMixin": "diffusers", "PyTorchModelHubMixin": "huggingface_hub"}


def library_of(model: nn.Module | None) -> str | None:
    """Return ``"transformers"``, ``"diffusers"``, ``"huggingface_hub"`` (a model with its mixin) or ``None``."""
    for base in type(model).__mro__:
        library = _BASES.get(base.__name__)
        if library is not None and base.__module__.startswith(f"{library}."):
            # A class that says itself how it is saved is read by its own counterpart.
            writes_itself = getattr(type(model), "_save_pretrained", None) is not getattr(
                base, "_save_pretrained", None
            )
            return None if writes_itself else library
    return None


def file_names(model: nn.Module | None, prefix: str | None = None, *, use_safetensors: bool = True) -> FileNames:
    """Return how the files of a model are called, by the library that reads it.

    Args:
        model: The user's own model.
        prefix: As for `FileNames`.
        use_safetensors: Whether they are safetensors.
    """
    suffix = SAFETENSORS if use_safetensors else TORCH
    of_others = MODEL if use_safetensors else TORCH_MODEL
    return FileNames(base=DIFFUSERS if library_of(model) == "diffusers" else of_others, suffix=suffix, prefix=prefix)


def config_of(model: nn.Module) -> dict[str, str]:
    """Return the configuration file of a model of diffusers or with the Hub's mixin, by its name."""
    library, of_library = library_of(model), cast("Any", model)
    content: Any = None
    if library == "diffusers":
        content = {**json.loads(of_library.to_json_string()), "_class_name": own_class(model).__name__}
    elif library == "huggingface_hub":
        content = of_library._hub_mixin_config  # noqa: SLF001 - what its `save_pretrained` writes
        content = dataclasses.asdict(content) if dataclasses.is_dataclass(content) else content  # type: ignore[arg-type]
    name: str = getattr(model, "config_name", None) or "config.json"
    return {} if content is None else {name: json.dumps(content, indent=2, sort_keys=True) + "\n"}
