"""The list of layers along which sequences are split, and what can't be asked of it then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def layers_of(model: nn.Module, lists: Sequence[str], mode: str) -> list[nn.Module]:
    """Return the layers of a model, in the order in which they run.

    Args:
        model: The user's model.
        lists: Names of lists of layers; those that it lacks are passed over.
        mode: The mode of sequence parallelism, for messages.

    Raises:
        ConfigError: If there is not exactly one list, or layers may be skipped.
    """
    modules = dict(model.named_modules())
    found = [name for name in lists if isinstance(modules.get(name), nn.ModuleList)]
    if len(found) != 1:
        what = "no list of layers" if not found else f"{len(found)} lists of layers ({', '.join(found)})"
        msg = (
            f"`sequence_parallelism_mode={mode!r}` splits sequences along one list of layers, but the policy of "
            f"{type(model).__name__} names {what} of the model's. Leave sequences whole for this model, or pass "
            "`custom_policy=ShardingPolicy(layers=['model.layers'])` with the name of its list."
        )
        raise ConfigError(msg)
    dropped = getattr(getattr(model, "config", None), "layerdrop", 0.0)
    if dropped:
        msg = f"`layerdrop={dropped}` skips layers at random, also the first, where sequences are split. Set it to 0."
        raise ConfigError(msg)
    layers: Any = modules[found[0]]
    return list(layers)


def refuse_outputs_of_layers(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse, before a forward, what the layers have in between, of which each rank has a part.

    Raises:
        ConfigError: If it is asked for.
    """
    del args
    config = getattr(module, "config", None)
    for name in ("output_hidden_states", "output_attentions"):
        asked = kwargs.get(name)
        if asked or (asked is None and getattr(config, name, False)):
            msg = (
                f"`{name}=True` asks for what the layers have in between, of which each rank has a part. Leave it out."
            )
            raise ConfigError(msg)
