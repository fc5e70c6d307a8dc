"""Offload of activations: chosen modules keep on the host what they save for backward, and compute nothing twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError
from booster_runtime.activations.chosen import chosen_modules, names_of
from booster_runtime.activations.forwards import Replaced, replace_forward, restore_forwards
from booster_runtime.activations.marks import OFFLOADED, check_apart
from booster_runtime.activations.saved_on_host import LEAST_BYTES, SavedOnHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


def enable_activation_offload(
    model: nn.Module,
    by: str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Iterable[Any] | None = None,
    *,
    every: int = 1,
    least_bytes: int = LEAST_BYTES,
) -> list[str]:
    """Let modules keep what they save for backward in page-locked memory of the host.

    It travels in a stream of its own while the device computes on, and comes back one module ahead of backward. Works
    before and after ``boost``, under any plugin. On the CPU, whose memory is the host's, nothing is copied.

    Args:
        model: The model, boosted or not.
        by: Which modules; as for `enable_activation_checkpointing`.
        every: Of the modules found, in the model's order, take the first, and then each ``every``-th.
        least_bytes: Memory of fewer bytes stays on the device.

    Returns:
        The names of the modules that are offloaded now.

    Raises:
        TypeError: If ``model`` or ``by`` is of another type.
        ConfigError: If no module is meant, one is checkpointed or offloaded already (also one around or inside of it),
            or a number is not positive. Nothing is changed then.

    Parameters and buffers stay, and so do views that are conjugates, sparse tensors and tensors of other classes.
    ``torch.compile`` compiles what is inside of a module, and not across its border.

    Memory: of the device what two modules save, and what is in flight; of the host what all of them save.
    Time: each byte crosses the bus twice a step. To recompute instead, and to keep only inputs on the host, see
    `enable_activation_checkpointing`.
    Collective: none; ranks need not do the same.
    """
    chosen = chosen_modules(model, by, every, "enable_activation_offload")
    if not isinstance(least_bytes, int) or isinstance(least_bytes, bool) or least_bytes < 1:
        msg = f"`least_bytes={least_bytes!r}` is not a positive number of bytes."
        raise ConfigError(msg)
    check_apart(names_of(model), list(chosen))
    saved = SavedOnHost(least_bytes)
    for module in chosen:
        settings = _Settings(own=vars(module).get("forward"), saved=saved)
        replace_forward(module, OFFLOADED, settings, _offloaded_forward)
    return list(chosen.values())


def disable_activation_offload(model: nn.Module) -> None:
    """Take back what `enable_activation_offload` did.

    Collective: none; ranks need not do the same.
    """
    restore_forwards(model, OFFLOADED)


@dataclass(frozen=True, kw_only=True)
class _Settings(Replaced):
    """What an offloaded module has to remember.

    Args:
        saved: Keeps on the host what it saves.
    """

    saved: SavedOnHost


def _offloaded_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    settings: _Settings = vars(self)[OFFLOADED]
    return settings.saved.run(self, settings.forward_of(self), *args, **kwargs)
