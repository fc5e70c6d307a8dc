"""Parameters that are two objects over one memory: sharding would untie them without a word, so it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def check_distinct_memory(model: nn.Module) -> None:
    """Check that no trained parameter begins at the same place in memory as another one, lazy ones included.

    Frozen ones that share theirs are equal forever, tied or not.

    Args:
        model: The user's model, before anything of it is moved.

    Raises:
        ConfigError: Naming two that do.
    """
    found: dict[object, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        other_name, other = found.setdefault(_place_of(parameter), (name, parameter))
        if other is not parameter and (other.requires_grad or parameter.requires_grad):
            msg = (
                f"Parameters '{other_name}' and '{name}' are two objects over the same memory. Tie them by assigning "
                "one Parameter to both modules."
            )
            raise ConfigError(msg)


def _place_of(parameter: nn.Parameter) -> object:
    # Of a lazy tensor, the meta tensor of its geometry. Not by its class: `booster_runtime.lazy` uses this package.
    tensor = getattr(parameter, "lazy_inner", parameter)
    storage = tensor.untyped_storage()
    # A tensor of meta has no address, but its storage is an object of its own.
    begin = storage._cdata if tensor.device.type == "meta" else storage.data_ptr()  # noqa: SLF001 - what identifies it
    return tensor.device, begin + tensor.storage_offset() * tensor.element_size()
