"""A user's script and its functions, as commands name them: ``train.py:build``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_tools.functions import TrainingFunctions

if TYPE_CHECKING:
    from collections.abc import Callable


def _module_of(path: Path) -> Any:
    """Import a script.

    Raises:
        ConfigError: If it is no file, or no Python file.
    """
    if not path.is_file():
        msg = f"No file '{path}'."
        raise ConfigError(msg)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        msg = f"'{path}' is not a Python file."
        raise ConfigError(msg)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _function_of(module: Any, name: str, file: str) -> Callable[..., Any]:
    """Return a function of a script.

    Raises:
        ConfigError: If it has none of that name.
    """
    found = getattr(module, name, None)
    if not callable(found):
        msg = f"'{file}' has no function '{name}'."
        raise ConfigError(msg)
    function: Callable[..., Any] = found
    return function


def language_model(name: str, *, length: int, samples: int, recomputes: bool = False) -> TrainingFunctions:
    """Return functions that make a language model of transformers, its optimizer, and a batch of tokens.

    Args:
        name: Its id on the Hub, or a folder with its ``config.json``; no weights are read.
        length: Tokens of a sample.
        samples: Samples of the whole batch.
        recomputes: Recompute activations in backward, layer by layer.

    Raises:
        ConfigError: If transformers is not installed, or finds no configuration.
    """
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as cause:
        msg = f"`--model {name}` needs transformers ({cause}). Run `pip install transformers`, or name FILE:FUNCTION."
        raise ConfigError(msg) from cause
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as cause:
        msg = f"transformers finds no configuration of '{name}': {cause}"
        raise ConfigError(msg) from cause

    def build() -> tuple[Any, Any]:
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        if recomputes:
            # newer versions of transformers deprecate the second name
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5)

    def batch() -> dict[str, Any]:
        tokens = torch.zeros(samples, length, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    return TrainingFunctions(build, batch)


def functions_of(build: str, batch: str, loss: str | None = None) -> TrainingFunctions:
    """Return a script's functions that make what is trained, and the batch, and compute the loss.

    Args:
        build: ``FILE:FUNCTION``; without a function, ``build``.
        batch: Name of another function of the file.
        loss: Name of a third; ``None`` for the loss that outputs have.

    Raises:
        ConfigError: If the file is no Python file, or has no such functions.
    """
    file, _, function = build.partition(":")
    module = _module_of(Path(file))
    made = [_function_of(module, name, file) for name in (function or "build", batch, loss) if name is not None]
    return TrainingFunctions(*made)
