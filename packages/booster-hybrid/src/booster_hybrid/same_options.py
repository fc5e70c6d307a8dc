"""Whether the ranks that generate one text together were given the same options, from wherever these come.

What decides how many forwards the loop makes and which tokens it takes: the arguments of `generate`, a
``generation_config`` among them, and the one of the model where none is given. Ranks with other ones would wait for
each other, or go on with other texts.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.ranks import DistCoordinator
from booster_hybrid.same_batch import checksum_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from booster_hybrid.axes import Axis

_UNCOMPARED = ("streamer", "self", "transformers_version")
"""What a rank may have alone: it shows the tokens, or tells what wrote a configuration."""
_DEPTH = 4
"""How deep objects are looked into, such as lists of stopping criteria."""


def check_same_options(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], inner: Any, replica: Axis
) -> None:
    """Raise on all ranks of a replica if they generate with different options.

    Args:
        method: The ``generate`` that is called.
        args: Its arguments; tensors among them are for `check_same_batch`.
        kwargs: Those by name.
        inner: The model of transformers that generates; ``None`` for a loop of the user's own.
        replica: The ranks.

    Raises:
        ConfigError: Naming the options and who has which value; or if a clock ends the loop, which each rank reads
            for itself.

    Collective: the ranks of the replica.
    """
    options = _resolved(_named(method, args, kwargs), inner)
    own = {name: _printable(value) for name, value in options.items() if not isinstance(value, torch.Tensor)}
    remedy = "These ranks generate one text together: pass the same on each, also in the model's `generation_config`."
    DistCoordinator().agree("generate", own, remedy=remedy, process_group=replica.group)
    if replica.size > 1 and inner is not None and _reads_clock(options):
        msg = (
            "`max_time` ends the loop by a clock, which each of the ranks that generate one text together reads for "
            "itself: some would wait for a token more than others. Use `max_new_tokens`."
        )
        raise ConfigError(msg)


def _named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name; the method itself raises what it can't be called with."""
    try:
        bound = inspect.signature(method).bind_partial(*args).arguments
    except TypeError:
        bound = {f"argument {index}": value for index, value in enumerate(args)}
    return {name: value for name, value in {**bound, **kwargs}.items() if name not in _UNCOMPARED}


def _resolved(given: dict[str, Any], inner: Any) -> dict[str, Any]:
    """Return what transformers makes of arguments: they take the place of settings in a ``generation_config``."""
    config = given.pop("generation_config", None)
    if config is None:
        config = getattr(inner, "generation_config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    settings["use_cache"] = None  # only who asks for a cache in a call is refused one that can't be
    return {**{name: value for name, value in settings.items() if name not in _UNCOMPARED}, **given}


def _reads_clock(options: Mapping[str, Any]) -> bool:
    criteria = options.get("stopping_criteria") or ()
    return options.get("max_time") is not None or any(type(each).__name__ == "MaxTimeCriteria" for each in criteria)


def _printable(value: Any, depth: int = 0) -> Any:
    """Return what prints alike on every rank that has the same: classes and what is in them, but no addresses."""
    if isinstance(value, (list, tuple)):
        return [_printable(each, depth + 1) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_printable(each, depth + 1)) for each in value)
    fields = value if isinstance(value, dict) else None
    if fields is None and hasattr(value, "to_dict") and not isinstance(value, (type, nn.Module)):
        fields = value.to_dict()
    if fields is not None:
        return {str(name): _printable(each, depth + 1) for name, each in fields.items() if name not in _UNCOMPARED}
    return _printable_leaf(value, depth)


def _printable_leaf(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} of {value.dtype}, checksum {checksum_of(value):#x}"
    function = value.func if isinstance(value, functools.partial) else value
    if hasattr(function, "__qualname__"):  # also a class
        return f"{function.__module__}.{function.__qualname__}"
    kind = type(value).__qualname__
    if depth >= _DEPTH or isinstance(value, nn.Module):
        return kind
    inside = {name: _printable(each, depth + 1) for name, each in sorted(getattr(value, "__dict__", {}).items())}
    return f"{kind} {inside}"
