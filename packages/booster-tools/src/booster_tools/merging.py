"""LoRA adapters merged into the model that they were trained on, by peft."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path


FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CONFIG = "adapter_config.json"


def merge_lora(adapters: Path, *, base: str | None = None, dtype: str | None = None) -> tuple[str, Any]:
    """Return a model of transformers with adapters merged into its weights.

    Args:
        adapters: A folder that `Booster.save_lora_as_pretrained` or peft wrote.
        base: Folder or Hub id of the base model; ``None`` takes what the adapters' configuration names.
        dtype: Name of a format products are added in fp32 and rounded once. ``None`` leaves
            that of the base.

    Returns:
        The base's name, and the model, on the host.

    Raises:
        ConfigError: If transformers or peft is not installed, no base is named, or its class is not known.
        CheckpointError: If a folder can't be read, or the adapters don't fit the base.
    """
    try:
        import peft
        import transformers
    except ImportError as error:
        msg = f"Merging adapters needs {error.name}. Run `pip install 'booster-runtime[lora,transformers]'`."
        raise ConfigError(msg) from error
    if not (adapters / _CONFIG).is_file():
        msg = f"'{adapters}' holds no '{_CONFIG}'. Pass a folder that `save_lora_as_pretrained` wrote."
        raise CheckpointError(msg)
    found = base or json.loads((adapters / _CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not found:
        msg = f"The adapters in '{adapters}' don't name their base model. Pass it by `--base`."
        raise ConfigError(msg)
    try:
        config = transformers.AutoConfig.from_pretrained(found)
        names = config.architectures or []
        kind: Any = getattr(transformers, names[0], None) if names else None
        if kind is None:
            msg = f"The base '{found}' names no class of transformers ({names}). Merge by peft in a script that does."
            raise ConfigError(msg)
        plain = kind.from_pretrained(found, dtype="auto")
        target = plain.dtype if dtype is None else FORMATS[dtype]
        with warnings.catch_warnings():
            # peft 0.21 reads an attribute that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
            adapted = peft.PeftModel.from_pretrained(plain.float(), str(adapters))
        merged = adapted.merge_and_unload(safe_merge=True)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        msg = f"The adapters in '{adapters}' can't be merged into '{found}': {error}"
        raise CheckpointError(msg) from error
    return str(found), merged.to(target)
