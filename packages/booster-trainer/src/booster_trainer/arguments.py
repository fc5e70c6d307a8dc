"""Checks that ``TrainingArguments`` ask for nothing that a `Booster` decides, or that can't be followed under one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_core.state import is_adapted, without_adapters

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import TrainingArguments

    from booster_core import Booster

_PLUGIN = "The Booster's plugin decides on the strategy: leave it out"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fsdp": ((None, False, "", []), "Leave it out, and use `Booster(plugin='fsdp')`"),
    "deepspeed": ((None,), "Leave it out, and use `Booster(plugin='zero')` or `Booster(plugin='gemini')`"),
    "parallelism_config": ((None,), _PLUGIN),
    "ddp_find_unused_parameters": ((None,), "Pass it to `TorchDDPPlugin`"),
    "ddp_bucket_cap_mb": ((None,), "Pass it to `TorchDDPPlugin`"),
    "ddp_broadcast_buffers": ((None,), "Pass it to `TorchDDPPlugin`"),
    "ddp_static_graph": ((None,), "Pass it to `TorchDDPPlugin`"),
    "torch_compile": ((False, None), "Leave it out, and call `model.compile()` before the Trainer is made"),
    "bf16_full_eval": ((False,), "Evaluation computes in the precision of the Booster: leave it out"),
    "fp16_full_eval": ((False,), "Evaluation computes in the precision of the Booster: leave it out"),
    "auto_find_batch_size": (
        (False,),
        "A rank that runs out of memory would leave the others waiting. Find the batch size by `booster plan`",
    ),
    "save_on_each_node": ((False,), "A checkpoint is one folder that all hosts see: leave it out"),
}
"""Arguments that have one meaning under a Booster: their values, and what to do in place of others."""


def check_arguments(args: TrainingArguments, booster: Booster, model: nn.Module) -> None:
    """Check what the Trainer's arguments ask for.

    Args:
        args: The arguments.
        booster: Trains the model.
        model: The user's model, from which the precision follows where the Booster was asked for none.

    Raises:
        ConfigError: If an argument contradicts the Booster, or can't be followed.

    Collective: none; the arguments are the same on every rank.
    """
    for name, (values, remedy) in _REFUSED.items():
        value = getattr(args, name, values[0])
        if not any(value is each or value == each for each in values):
            msg = f"`TrainingArguments({name}={value!r})` can't be followed under a Booster. {remedy}."
            raise ConfigError(msg)
    if args.load_best_model_at_end and is_adapted(model):
        msg = (
            "`load_best_model_at_end=True` can't be followed for adapters, which aren't read into a boosted model. "
            "Leave it out, and after training load the best ones from `trainer.state.best_model_checkpoint` by "
            "`booster.enable_lora(base, pretrained_dir=...)`."
        )
        raise ConfigError(msg)
    asked = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    computes_in = booster.precision.for_model(model).name
    if asked is not None and asked != computes_in:
        msg = (
            f"`TrainingArguments({asked}=True)` asks for another precision than the Booster, which computes in "
            f"{computes_in}. Use `Booster(mixed_precision='{asked}')`, or `{asked}=False`."
        )
        raise ConfigError(msg)
    shares_batches = booster.plugin.data_parallel_coordinates(booster.context.coordinator)[1] < args.world_size
    if shares_batches and args.train_sampling_strategy == "batch_rebalance":
        msg = (
            "`train_sampling_strategy='batch_rebalance'` gives each rank batches of its own, and ranks of this plugin "
            "share batches. Use 'random', 'sequential' or 'group_by_length'."
        )
        raise ConfigError(msg)
    device = torch.device(args.device)
    index_differs = None not in (device.index, booster.device.index) and device.index != booster.device.index
    if device.type != booster.device.type or (device.type != "cpu" and index_differs):
        msg = (
            f"TrainingArguments run on {device}, the Booster on {booster.device}. Pass `use_cpu=True` to "
            f"TrainingArguments, or `Booster(device='{device}')`, so that both are the same."
        )
        raise ConfigError(msg)


def check_accelerator(accelerator: Accelerator) -> None:
    """Check that `accelerate launch` asked for no strategy of its own.

    Raises:
        ConfigError: If it did.
    """
    for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config"):
        if getattr(accelerator.state, name, None) is not None:
            msg = f"Accelerate is configured with a `{name}`, next to a Booster. Start the script by torchrun."
            raise ConfigError(msg)


def check_model(model: nn.Module | None) -> None:
    """Check that transformers has not spread the model over devices.

    Raises:
        ConfigError: If it has.
    """
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1 or getattr(model, "is_distributed_loading_by_transformers", False):
        msg = (
            "The model was spread over devices when it was loaded, which is the plugin's part. Load it without "
            "`device_map`, `tp_plan` and `distributed_config`."
        )
        raise ConfigError(msg)


def check_forward(model: nn.Module, plugin: str, *, is_split: bool) -> None:
    """Check that nobody replaced the forward of a model whose layers the plugin splits.

    TRL's ``SFTTrainer`` does, by one that reads the weights of the head, of which each rank would have a part.

    Raises:
        ConfigError: If someone has.
    """
    inner = without_adapters(model)
    if is_split and any("forward" in vars(module) for module in (model, inner)):
        msg = (
            f"The Trainer has replaced `{type(inner).__name__}.forward`, by one that may read weights itself, and "
            f"plugin '{plugin}' splits them between ranks: losses would be those of a part of the vocabulary. Use a "
            "plugin whose ranks each compute whole layers, such as 'fsdp' or 'zero'."
        )
        raise ConfigError(msg)
