"""The user's own names for a model's tensors, whatever has been wrapped around the model since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_EXTRA_STATE = "_extra_state"


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own module: below our wrappers, ``DistributedDataParallel`` and ``torch.compile``.

    Collective: none.
    """
    while True:
        inner = _inner_of(model)
        if inner is None or inner is model:
            return model
        model = inner


def _inner_of(model: nn.Module) -> nn.Module | None:
    unwrap = getattr(model, "unwrap", None)
    if callable(unwrap):
        unwrapped: nn.Module = unwrap()
        return unwrapped
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        module: nn.Module = model.module
        return module
    compiled: nn.Module | None = getattr(model, "_orig_mod", None)
    return compiled


@dataclass(frozen=True, kw_only=True)
class NamedTensors:
    """A model's parameters and persistent buffers under the names that ``state_dict`` gives them.

    Args:
        tensors: Each tensor once, under its first name, in the order of ``state_dict``.
        aliases: For each further name of a tied tensor, its first name.
        name_of: The first name of each tensor object of the model, by ``id``. Valid while the model keeps them.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> NamedTensors:
        """Return the tensors of the user's own module."""
        named = cls()
        first_names: dict[object, str] = {}
        for name, tensor in _walk(module):
            first = first_names.setdefault(_identity(tensor), name)
            named.name_of[id(tensor)] = first
            if first == name:
                named.tensors[name] = tensor
            else:
                named.aliases[name] = first
        return named


def _walk(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            yield start + name, parameter
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public name for it
                yield start + name, buffer


def _identity(tensor: Tensor) -> object:
    """Return what tied tensors have in common: they are one object, or all of the same memory."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # fake tensors and the like have none
        address = 0
    if address == 0 or tensor.numel() == 0:
        return id(tensor)
    return address, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def extra_state_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, by its name in ``state_dict``."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        has_state = type(child).get_extra_state is not nn.Module.get_extra_state
        if has_state and id(child) not in seen:
            seen.add(id(child))
            found[f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE] = child
    return found
