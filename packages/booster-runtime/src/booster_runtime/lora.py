"""Low-rank adapters through peft: put around a model before ``boost``, and what ``boost`` then sees to.

Reference: Hu et al. 2021, "LoRA" (arXiv:2106.09685). How adapters are written is in
`booster_checkpoint.save.lora`, how a model keeps its names under them in `booster_core.state.names`.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from booster_core.errors import CheckpointError, ConfigError
from booster_core.plugin import Capability, ModelWrapper, boosted_inside
from booster_core.state import NamedTensors, compiled_module, has_adapters
from booster_runtime.lazy.context import continued
from booster_runtime.lazy.recording import is_lazy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peft import LoraConfig, PeftModel
    from torch.optim import Optimizer
    from transformers import BitsAndBytesConfig

    from booster_core.plugin import Plugin

_INSTALL = "`pip install 'booster-runtime[lora]'`"
_CONFIG = "adapter_config.json"
_LORA_KINDS = frozenset({"LORA", "ADALORA"})
_SHARDING = frozenset({"single", "ddp", "fsdp", "zero", "gemini"})
_TESTED = frozenset({"FOURIERFT", "IA3", "LOHA", "LOKR", "OFT", "VERA"})
"""Adapters of other kinds, by peft's names, that get the gradients of one process under `_SHARDING`."""


def add_adapters(
    model: nn.Module,
    plugin: Plugin,
    *,
    lora_config: LoraConfig | None,
    pretrained_dir: str | Path | None,
    quantization: BitsAndBytesConfig | None = None,
) -> PeftModel:
    """Return a model with low-rank adapters, all else of it frozen; see `Booster.enable_lora`."""
    _check_plugin(plugin)
    if not isinstance(model, nn.Module):
        msg = f"`enable_lora` needs a torch.nn.Module; got `{type(model).__name__}`."
        raise TypeError(msg)
    _check_model(model)
    if (lora_config is None) == (pretrained_dir is None):
        given = "neither" if lora_config is None else "both"
        msg = f"`enable_lora` takes one of `lora_config` and `pretrained_dir`; got {given} of them."
        raise ConfigError(msg)
    try:
        import peft
    except ImportError as error:
        msg = f"`enable_lora` needs peft, which is not installed. Run {_INSTALL}."
        raise ConfigError(msg) from error
    if quantization is not None:
        from booster_runtime.quantization import quantize_linears

        if is_lazy(model):
            msg = "A lazy model has no values to quantise. Build it without `LazyInitContext`, or leave out `quantize`."
            raise ConfigError(msg)
        quantize_linears(model, quantization)
    if pretrained_dir is not None:
        return _load(model, Path(pretrained_dir).expanduser())
    if not isinstance(lora_config, peft.LoraConfig):
        msg = f"`lora_config` must be a peft.LoraConfig; got `{type(lora_config).__name__}`."
        raise TypeError(msg)
    try:
        with _without_warnings_about_peft(), continued(model):
            return peft.get_peft_model(model, lora_config)
    except ValueError as error:
        _strip(model)
        candidates = sorted({name.rpartition(".")[2] for name, child in model.named_modules() if _is_linear(child)})
        msg = f"{str(error).rstrip('.')}. Linear layers of `{type(model).__name__}`: {', '.join(candidates)}."
        raise ConfigError(msg) from error


def check_adapters(model: nn.Module, optimizers: Sequence[Optimizer], plugin: Plugin) -> None:
    """Check a model that has adapters before it is boosted.

    Raises:
        ConfigError: If the plugin does not train adapters, or the optimizer was made before they were.
    """
    if not has_adapters(model):
        return
    _check_plugin(plugin)
    if not optimizers:
        return
    _check_kinds(model, plugin)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    adapters = _adapter_parameters(model) & trained
    if not held & adapters or (held - trained and adapters - held):
        named = NamedTensors.of(model)
        missing = [named.name_of[key] for key in adapters - held]
        msg = (
            f"The optimizer lacks {len(missing)} parameters of adapters, such as '{min(missing)}': it was made before "
            "`enable_lora`. Make it afterwards, from the parameters of the model that `enable_lora` returned."
            if missing
            else "No adapter of the model is trained. Pass `is_trainable=True` where adapters are loaded by peft."
        )
        raise ConfigError(msg)


def drop_frozen(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Take the frozen base of a model that has adapters out of its optimizer.

    ``AdamW(model.parameters())`` lists the base too. Strategies that shard what an optimizer lists would keep master
    weights of it, which never change. An adapter that is frozen now stays, as ``set_adapter`` may choose it later.
    """
    if optimizer is None or not has_adapters(model):
        return
    adapters = _adapter_parameters(model)

    def stays(parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or id(parameter) in adapters

    for group in optimizer.param_groups:
        names: list[str] | None = group.get("param_names")
        if names is not None:
            group["param_names"] = [
                name for name, parameter in zip(names, group["params"], strict=True) if stays(parameter)
            ]
        for parameter in group["params"]:
            if not stays(parameter):
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if stays(parameter)]


def _check_kinds(model: nn.Module, plugin: Plugin) -> None:
    """Raise for adapters whose gradients under this plugin are wrong, or that nobody has compared."""
    kinds = {config.peft_type.value for config in getattr(model, "peft_config", {}).values()}
    for kind in sorted(kinds - _LORA_KINDS):
        if kind not in _TESTED or plugin.name not in _SHARDING:
            msg = (
                f"Adapters of type {kind} have not been tested under plugin '{plugin.name}': their gradients may be "
                f"wrong. Tested are {', '.join(sorted(_TESTED))} under {', '.join(sorted(_SHARDING))}, and "
                f"{' and '.join(sorted(_LORA_KINDS))} under every plugin."
            )
            raise ConfigError(msg)


def _adapter_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that peft has added to layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = set()
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for name in layer.adapter_layer_names:
                added = getattr(layer, name, None)
                if isinstance(added, nn.Module):
                    found |= {id(parameter) for parameter in added.parameters()}
    return found


def _check_plugin(plugin: Plugin) -> None:
    if Capability.LORA not in plugin.capabilities:
        msg = (
            f"Plugin '{plugin.name}' does not train adapters (it does not declare `Capability.LORA`). Choose another "
            "plugin, such as 'ddp' or 'zero'."
        )
        raise ConfigError(msg)


def _check_model(model: nn.Module) -> None:
    if isinstance(boosted_inside(model), ModelWrapper):
        msg = "The model is already boosted. Call `enable_lora` before `boost`, and make the optimizer in between."
        raise ConfigError(msg)
    if compiled_module(model) is not None:
        msg = "The model is compiled already. Call `enable_lora` before `torch.compile`, which may follow."
        raise ConfigError(msg)
    if has_adapters(model):
        msg = (
            "The model has adapters already. For a further one, call `model.add_adapter(name, config)` or "
            "`model.load_adapter(folder, name)` of the model that `enable_lora` returned."
        )
        raise ConfigError(msg)


def _load(model: nn.Module, folder: Path) -> PeftModel:
    import peft

    if not (folder / _CONFIG).is_file():
        # peft would go and ask the network.
        msg = f"`pretrained_dir='{folder}'` holds no '{_CONFIG}'. Pass a folder that `save_lora_as_pretrained` wrote."
        raise CheckpointError(msg)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, peft.LoraConfig):
            msg = f"`pretrained_dir='{folder}'` holds adapters of type {config.peft_type}, not LORA."
            raise ConfigError(msg)
        with _without_warnings_about_peft(), continued(model):
            loaded: PeftModel = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        _strip(model)
        msg = f"The adapters in '{folder}' do not fit `{type(model).__name__}`: {error}"
        raise CheckpointError(msg) from error
    return loaded


@contextlib.contextmanager
def _without_warnings_about_peft() -> Iterator[None]:
    with warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.23 has renamed; the script that hears of it can't help it.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


def _strip(model: nn.Module) -> None:
    """Take away what an attempt that failed has left on the model, so that another can be made."""
    if hasattr(model, "peft_config"):
        del model.peft_config


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
