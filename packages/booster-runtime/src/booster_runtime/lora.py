"""Low-rank adapters through peft: put around a model before ``boost``, and what ``boost`` then sees to.

References: Hu et al. 2021, "LoRA" (arXiv:2106.09685); for frozen bases in 8 or 4 bits, through transformers and
bitsandbytes, Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314). How adapters are written is in
`booster_checkpoint.save.lora`, how a model keeps its names under them in `booster_core.state.names`.

Parameters that were frozen at ``boost`` must stay frozen, the base of adapters or others (`FrozenParameters`): no
optimizer would step them, and on one device and under FSDP nothing else tells.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import CheckpointError, ConfigError, GradientError, shorten
from booster_core.plugin import Capability, ModelWrapper, boosted_inside, unwrap_model
from booster_core.state import NamedTensors, compiled_module, has_adapters
from booster_runtime.lazy.context import continued
from booster_runtime.lazy.recording import is_lazy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from peft import LoraConfig, PeftModel
    from torch import Tensor
    from torch.optim import Optimizer
    from transformers import BitsAndBytesConfig

    from booster_core.plugin import Boosted, OptimizerWrapper, Plugin

_INSTALL = "`pip install 'booster-runtime[lora]'`"
_CONFIG = "adapter_config.json"


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


def frozen_parameters(objects: Boosted) -> set[str]:
    """Return the names of a model's frozen parameters that no optimizer lists, before a strategy lays the model out."""
    if not objects.optimizers:
        return set()
    listed = {
        id(parameter) for each in objects.optimizers for group in each.param_groups for parameter in group["params"]
    }
    name_of = NamedTensors.of(objects.model).name_of
    return {
        name_of[id(parameter)]
        for parameter in objects.model.parameters()
        if not parameter.requires_grad and id(parameter) not in listed
    }


def watch_frozen(boosted: Boosted, names: Collection[str]) -> None:
    """Let each step of a boosted optimizer check that what was frozen still is."""
    for optimizer in boosted.optimizers[:1]:
        optimizer.frozen = FrozenParameters(unwrap_model(boosted.model), names)


class FrozenParameters:
    """Checks at each step that the parameters which an optimizer does not train are still frozen.

    Args:
        model: The user's own model, as the strategy has laid it out.
        names: The parameters; what a parameter group that is added later lists is trained.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        tensors = NamedTensors.of(model).tensors
        self._tensors: dict[str, Tensor] = {name: tensors[name] for name in sorted(names) if name in tensors}

    def check(self, optimizer: OptimizerWrapper) -> None:
        """Check that none requires gradients.

        Raises:
            GradientError: If one does.
        """
        if not any(tensor.requires_grad for tensor in self._tensors.values()):
            return
        listed = set().union(*(each.listed_parameters() for each in optimizer.scaling.optimizers))
        names = [name for name, tensor in self._tensors.items() if tensor.requires_grad and id(tensor) not in listed]
        if names:
            msg = (
                f"{len(names)} parameters that were frozen at `boost` require gradients now, such as '{names[0]}', and "
                "would not be trained. Unfreeze them (or set the adapter) before the optimizer is made and `boost` is "
                "called, or freeze them again before `step`."
            )
            raise GradientError(msg)


_NOT_PACKED = (nn.Embedding, nn.modules.conv._ConvNd)  # noqa: SLF001 - the convolutions' base has no public name
"""Layers that libraries keep in full precision, as everyone expects."""


def check_quantization(config: Any, device: torch.device) -> BitsAndBytesConfig:
    """Return how a base is quantised; 4 bits (nf4, twice quantised) where nothing is said.

    Raises:
        TypeError: If ``config`` is no ``transformers.BitsAndBytesConfig``.
        ConfigError: If the device is neither CUDA nor the CPU, or bitsandbytes or transformers are not installed.
    """
    if device.type not in ("cuda", "cpu"):
        msg = f"A base is quantised on CUDA and the CPU, and this run's device is '{device}'. Leave out `quantize`."
        raise ConfigError(msg)
    try:
        import bitsandbytes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401 - whether it is there
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        msg = "A quantised base needs bitsandbytes and transformers. Run `pip install bitsandbytes transformers`."
        raise ConfigError(msg) from error
    if config is None:
        return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if not isinstance(config, BitsAndBytesConfig):
        msg = f"`bnb_quantization_config` must be a transformers.BitsAndBytesConfig; got `{type(config).__name__}`."
        raise TypeError(msg)
    return config


def quantize_linears(model: nn.Module, config: BitsAndBytesConfig) -> None:
    """Replace a model's linear layers by quantised ones, in place; values are packed when they reach the device.

    The output head, and what ``config.llm_int8_skip_modules`` names, stay as they are.

    Raises:
        ConfigError: If other layers hold matrices, which transformers' integration does not quantise.
    """
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    head = getattr(model, "get_output_embeddings", lambda: None)()
    skipped = [*(config.llm_int8_skip_modules or [])]
    skipped += [path for path, layer in model.named_modules() if layer is head]
    before = {path: layer for path, layer in model.named_modules() if should_convert_module(path, skipped)}
    left_alone = [
        path
        for path, layer in before.items()
        if type(layer) is not nn.Linear and not isinstance(layer, (Conv1D, *_NOT_PACKED)) and _has_matrices(layer)
    ]
    if left_alone:
        msg = (
            f"{len(left_alone)} layers of `{type(model).__name__}` hold matrices that can't be quantised: "
            f"{shorten(left_alone)}. Name them in `llm_int8_skip_modules` of a `bnb_quantization_config` to keep them "
            "in full precision."
        )
        raise ConfigError(msg)
    replace_with_bnb_linear(model, skipped, config)
    for path, packed in model.named_modules():
        source = before.get(path)
        if isinstance(source, (nn.Linear, Conv1D)) and packed is not source:
            values = source.weight.detach()
            values = values.T.contiguous() if isinstance(source, Conv1D) else values
            kind, options = type(packed.weight), vars(packed.weight)
            packed.weight = kind(values, requires_grad=False, **options)
            packed.bias = source.bias
    # peft chooses its layers by these.
    model.is_loaded_in_4bit = bool(config.load_in_4bit)  # type: ignore[assignment]
    model.is_loaded_in_8bit = not config.load_in_4bit  # type: ignore[assignment]


def _has_matrices(layer: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))
