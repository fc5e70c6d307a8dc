"""The names of a model's tensors in the user's own model, without the wrappers that were put around it later.

Wrappers of peft are found without importing peft where it is not used.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import CheckpointError, ConfigError, shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torch import Tensor

_EXTRA_STATE = "_extra_state"
_COMPILED = "_orig_mod"
_BASE_LAYER = "base_layer"
_CHECKPOINTED = "_checkpoint_wrapped_module"
_BASES = {"PreTrainedModel": "transformers", "ModelMixin": "diffusers", "PyTorchModelHubMixin": "huggingface_hub"}
_T = TypeVar("_T")


def distinct(values: Iterable[_T]) -> list[_T]:
    """Return values without repetitions of the same object, in their order."""
    return list({id(value): value for value in values}.values())


def natural_order(name: str) -> tuple[tuple[tuple[int, int | str], ...], str]:
    """Return a sort key under which ``layers.2`` comes before ``layers.10``, and no two names are equal."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)), name


def named_modules(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield each module of a user's model, each time it is used, under its name without wrappers.

    Wrappers are ``torch.compile``'s ``_orig_mod``, torch's checkpoint wrapper, and those of peft around a model and its
    layers, so that a base model keeps its names when it gets adapters. An adapter's own modules are named
    by the layer that they are attached to: ``layers.0.q_proj.lora_A.default``. Where peft wraps a layer twice, as for
    two parameters of fused experts, what the inner wrapper adds keeps its ``base_layer``: both add a ``lora_A``.

    Yields:
        The name; the path by which the module is found in ``module``; the module. Parents come before children.
    """
    yield from _named_modules(module, "", "", peft_wrappers())


def _named_modules(
    module: nn.Module, name: str, path: str, wrappers: tuple[tuple[type, str], ...], added: str | None = None
) -> Iterator[tuple[str, str, nn.Module]]:
    yield name, path, module
    inner = _inner_attribute(module, wrappers)
    for attribute, child in module._modules.items():  # noqa: SLF001 - `named_children` leaves out repeated ones
        if child is None:
            continue
        path_below = _join(path, attribute)
        if attribute not in (inner, _COMPILED, _CHECKPOINTED):
            yield from _named_modules(child, _join(added or name, attribute), path_below, wrappers)
        elif attribute == _BASE_LAYER and _inner_attribute(child, wrappers) == _BASE_LAYER:
            yield from _named_modules(child, name, path_below, wrappers, _join(added or name, attribute))
        else:
            yield from _named_modules(child, name, path_below, wrappers)


def _inner_attribute(module: nn.Module, wrappers: tuple[tuple[type, str], ...]) -> str | None:
    return next((attribute for kind, attribute in wrappers if isinstance(module, kind)), None)


def compiled_module(model: nn.Module) -> nn.Module | None:
    """Return the module inside a compiled one; ``None`` where ``torch.compile`` did not make ``model``."""
    # Not by attribute: a module may forward unknown attributes to one inside of it.
    modules = model._modules  # noqa: SLF001 - torch's class costs the import of its compiler
    return modules[_COMPILED] if _COMPILED in modules else None  # noqa: SIM401 - a scripted module's have no `get`


def own_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a user's model; ``fully_shard`` gives modules a class of its own that extends theirs."""
    kind = type(model)
    while len(kind.__bases__) > 1 and kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[1]
    return kind


def _join(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


@dataclass(frozen=True, kw_only=True)
class NamedTensors:
    """A model's parameters and persistent buffers under the names that they have in the user's own model.

    These are the names in its ``state_dict``, without those of wrappers around modules; see `named_modules`.

    Args:
        tensors: Each tensor once, under its first name, in the order of ``state_dict``.
        aliases: For each further name of a tied tensor, its first name.
        name_of: The first name of each tensor object of the model, by ``id``. Valid while the model keeps them.
        paths: For each name, first or not, the path to the tensor through all that is around modules, as for
            ``get_parameter``.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> NamedTensors:
        """Return the tensors of the user's own module.

        Raises:
            ConfigError: If two tensors would have one name.
        """
        named = cls()
        first_names: dict[object, str] = {}
        identities: dict[str, object] = {}
        for name, path, tensor in _walk(module):
            identity = _identity(tensor)
            if identities.setdefault(name, identity) != identity:
                _refuse(name, named.paths[name], path)
            named.paths[name] = path
            first = first_names.setdefault(identity, name)
            named.name_of[id(tensor)] = first
            if first == name:
                named.tensors[name] = tensor
            else:
                named.aliases[name] = first
        return named

    @property
    def buffers(self) -> set[str]:
        """The names of those that are buffers."""
        return {name for name, tensor in self.tensors.items() if not isinstance(tensor, nn.Parameter)}


def call_with_tensors(
    model: nn.Module, instead: Mapping[int, Tensor], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a module with other tensors in the places of its own, which are back afterwards.

    Whatever calls ``torch.func.functional_call`` does it through this: given both names of a module that has two, torch
    puts the substitute in the place of the module's tensor for good.

    Args:
        model: The module.
        instead: For each tensor that is replaced, by ``id``, what takes its place wherever it is used.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    places = {
        _join(path, name): instead[id(tensor)]
        for path, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if id(tensor) in instead
    }
    return torch.func.functional_call(model, places, args, dict(kwargs or {}), tie_weights=False)


def _refuse(name: str, *paths: str) -> NoReturn:
    both = " and ".join(map(repr, paths))
    msg = (
        f"Two tensors of the model would have the name '{name}' in files: {both}, without what was put around modules. "
        "Rename one of the modules, or take one of the wrappers away."
    )
    raise ConfigError(msg)


def _walk(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for prefix, path, child in named_modules(module):
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            yield _join(prefix, name), _join(path, name), parameter
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public name for it
                yield _join(prefix, name), _join(path, name), buffer


def _identity(tensor: Tensor) -> object:
    """Return what tied tensors have in common: they are one object, or all of the same memory."""
    try:
        with DisableTorchFunctionSubclass():  # one without values has no address, which is no use of them
            address = tensor.data_ptr()
    except RuntimeError:  # fake tensors and the like have none
        address = 0
    if address == 0 or tensor.numel() == 0:
        return id(tensor)
    return address, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def extra_state_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, by its name in ``state_dict``.

    Raises:
        ConfigError: If two of them would have one name.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for prefix, path, child in named_modules(module):
        has_state = type(child).get_extra_state is not nn.Module.get_extra_state
        if has_state and id(child) not in seen:
            seen.add(id(child))
            if found.setdefault(_join(prefix, _EXTRA_STATE), child) is not child:
                _refuse(_join(prefix, _EXTRA_STATE), prefix, path)
    return found


def peft_wrappers() -> tuple[tuple[type, str], ...]:
    """Return peft's classes that hold a module of the user's, each with the attribute that it is under."""
    if "peft" not in sys.modules:
        return ()
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return (
        (PeftModel, "base_model"),
        (BaseTuner, "model"),
        (BaseTunerLayer, "base_layer"),
        (AuxiliaryTrainingWrapper, "original_module"),
    )


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model that peft was given; ``model`` itself where it was given none.

    Its layers have their adapters all the same: peft puts them there in place.
    """
    if "peft" not in sys.modules:
        return model
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model


def library_of(model: nn.Module | None) -> str | None:
    """Return whose ``from_pretrained`` reads a model: transformers', diffusers', that of huggingface_hub's mixin."""
    for base in type(model).__mro__:
        library = _BASES.get(base.__name__)
        if library is not None and base.__module__.startswith(f"{library}."):
            # A class that says itself how it is saved is read by its own counterpart.
            writes_itself = getattr(type(model), "_save_pretrained", None) is not getattr(
                base, "_save_pretrained", None
            )
            return None if writes_itself else library
    return None


def is_adapted(model: nn.Module) -> bool:
    """Return whether a user's own model is one of peft's."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has put adapters into a model."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def frozen_base(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are frozen next to adapters; none for a model without adapters."""
    if not has_adapters(model):
        return set()
    return {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}


def check_model_is_saved_whole(model: nn.Module, left_out: Collection[str] = ()) -> None:
    """Raise if modules add entries to ``state_dict`` that are neither tensors of theirs nor extra state.

    Quantised layers do so (``weight.absmax``), by an own ``_save_to_state_dict`` or by hooks.

    Args:
        model: The model.
        left_out: Names of tensors that are not saved, nor what is kept for these.

    Raises:
        CheckpointError: If so; the message names the entries.
    """
    if not any(_adds_entries(module) for module in model.modules()):
        return
    named = NamedTensors.of(model)
    known = {*named.paths, *named.paths.values()}
    # Not by the model's own method, which may take other arguments.
    saved = nn.Module.state_dict(model, keep_vars=True)
    added = [key for key in saved if key not in known and key.rpartition(".")[2] != _EXTRA_STATE]
    # What bitsandbytes keeps for a weight, under FSDP too, where the weight is another tensor than it was packed as.
    packed = [name for name, module in model.named_modules() if getattr(module, "quant_state", None) is not None]
    added = added or [f"{name}.weight.quant_state" for name in packed]
    absent = tuple(f"{path}." for name in left_out for path in (name, named.paths.get(name, name)))
    added = [key for key in added if not key.startswith(absent)]
    if added:
        msg = (
            f"{len(added)} entries of the model's `state_dict` would be lost: {shorten(added)}. They come from an own "
            "`_save_to_state_dict` or from hooks; checkpoints hold parameters, persistent buffers and what "
            "`get_extra_state` returns. Keep them in one of these, or leave frozen tensors out: "
            "`save_checkpoint(..., save_frozen=False)`, `save_lora_as_pretrained`."
        )
        raise CheckpointError(msg)


def _adds_entries(module: nn.Module) -> bool:
    own = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict  # noqa: SLF001 - what torch has authors override
    return own or bool(module._state_dict_hooks)  # noqa: SLF001 - torch lists them nowhere else


def may_have_load_hooks(model: nn.Module) -> bool:
    """Return whether modules may change what is loaded into them, by hooks or an own ``_load_from_state_dict``."""
    return any(module._load_state_dict_pre_hooks or overrides_load(module) for module in model.modules())  # noqa: SLF001 - torch lists them nowhere else


def overrides_load(module: nn.Module) -> bool:
    """Whether a class has a ``_load_from_state_dict`` of its own; torch's own ones only mend old versions of files."""
    return not type(module)._load_from_state_dict.__module__.startswith("torch.")  # noqa: SLF001 - what torch has authors override
