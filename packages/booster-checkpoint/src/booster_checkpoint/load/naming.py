"""A checkpoint's tensors under the names of a model: as the user renames and leaves out, then as transformers does."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from booster_checkpoint.files.composed import ComposedTensors, Layout
from booster_core.errors import CheckpointError, ConfigError
from booster_core.state import tensor_references

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from booster_checkpoint.load.source import Source


def as_model_names(
    source: Source,
    module: nn.Module | None,
    known: Iterable[str],
    *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    exclude: Sequence[str] = (),
) -> ComposedTensors:
    """Return a checkpoint's tensors and values by the names that they have in a model.

    Args:
        source: The open checkpoint.
        module: The user's own model, for transformers' conversions.
        known: Names that the model has.
        rename: As for `Booster.load_model`.
        exclude: As there.

    Raises:
        ConfigError: If ``rename`` is no function and no valid mapping, or ``exclude`` no sequence of patterns.
        CheckpointError: If two tensors get one name.
    """
    new_name = _renamer(rename)
    inside = {key for value in source.values.values() for key in tensor_references(value)}
    layouts: dict[str, Layout] = {}
    for key, meta in source.tensors.items():
        name = key if key in inside else new_name(key)
        if name in layouts:
            msg = f"`rename` gives the name '{name}' to two tensors of '{source.path}', one of them '{key}'."
            raise CheckpointError(msg)
        layouts[name] = Layout.of(key, meta)
    values = {new_name(key): key for key in source.values}
    known_names = set(known)
    if module is not None and not known_names.issuperset(layouts):
        from booster_checkpoint.files.transformers import named_in_model

        layouts = named_in_model(module, layouts, known_names)
    is_out = excluder(exclude)
    return ComposedTensors(
        source,
        {name: layout for name, layout in layouts.items() if not is_out(name)},
        {name: key for name, key in values.items() if not is_out(name)},
    )


def excluder(exclude: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a model's name matches one of some patterns.

    Raises:
        ConfigError: If they are no sequence of patterns.
    """
    if isinstance(exclude, str) or not all(isinstance(pattern, str) for pattern in exclude):
        msg = f"`exclude={exclude!r}` is no list of patterns. Pass such as `['lm_head.*']`."
        raise ConfigError(msg)
    return lambda name: any(fnmatchcase(name, pattern) for pattern in exclude)


def _renamer(rename: Any) -> Callable[[str], str]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return _checked(rename)
    try:
        patterns = [(re.compile(pattern), str(new)) for pattern, new in rename.items()]
    except (AttributeError, TypeError, re.error) as error:
        msg = f"`rename` is neither a function nor a dict of regular expressions and replacements: {error}."
        raise ConfigError(msg) from error

    def replace(name: str) -> str:
        for pattern, new in patterns:
            name = pattern.sub(new, name)
        return name

    return replace


def _checked(rename: Callable[[str], Any]) -> Callable[[str], str]:
    def call(name: str) -> str:
        new = rename(name)
        if not isinstance(new, str):
            msg = f"`rename` returned {new!r} for '{name}'. Return the name in the model; leave names out by `exclude`."
            raise ConfigError(msg)
        return new

    return call
