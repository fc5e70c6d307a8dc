"""Which modules of a model a function of this package is to change."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from booster_core.errors import ConfigError
from booster_core.plugin import unwrap_model
from booster_core.state import named_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Choice: TypeAlias = "str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Iterable[Any] | None"
"""A class or its name, a module, several of these, a function of a name and a module, or ``None`` for the blocks."""

_MAX_LISTED = 20


def select_modules(model: nn.Module, by: Choice, every: int, caller: str) -> dict[nn.Module, str]:
    """Return modules with their names in the user's model, in its order.

    Args:
        model: The model, boosted or not.
        by: Which modules; by default the model's repeated blocks.
        every: Of the modules found, the first is taken, and then each ``every``-th.
        caller: The function for messages.

    Raises:
        TypeError: If ``model`` or ``by`` is of another type.
        ConfigError: If no module is meant, or ``every`` is not positive.
    """
    if not isinstance(model, nn.Module):
        msg = f"`{caller}` needs a torch.nn.Module; got `{type(model).__name__}`."
        raise TypeError(msg)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        msg = f"`every={every!r}` is not a number of modules. Use 1 for all that are found, 2 for each second."
        raise ConfigError(msg)
    named = module_names(model)
    found = _repeated_blocks(named) if by is None else _meant(named, by)
    if not found:
        msg = f"No module of `{type(model).__name__}` is meant by `by={by!r}`. {_candidates(named)}"
        raise ConfigError(msg)
    return {module: named[module] for module in [module for module in named if module in found][::every]}


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return a model's modules with the first of their names in the user's model."""
    named: dict[nn.Module, str] = {}
    for name, _, module in named_modules(unwrap_model(model)):
        named.setdefault(module, name)
    return named


def _meant(named: dict[nn.Module, str], by: Any) -> set[nn.Module]:
    if isinstance(by, nn.Module):
        if by not in named:
            msg = f"The module `{type(by).__name__}` passed as `by` is not part of the model."
            raise ConfigError(msg)
        return {by}
    if isinstance(by, str):
        return {module for module in named if by in {base.__name__ for base in type(module).__mro__}}
    if isinstance(by, type):
        return {module for module in named if isinstance(module, by)}
    if callable(by):
        return {module for module, name in named.items() if by(name, module)}
    try:
        several = list(by)
    except TypeError:
        msg = (
            "`by` is a module class or its name, a module, several of these, or a function of a name and a module; "
            f"got `{type(by).__name__}`."
        )
        raise TypeError(msg) from None
    found: set[nn.Module] = set()
    for one in several:
        meant = _meant(named, one)
        if not meant:
            msg = f"No module of the model is meant by {one!r} of `by`. {_candidates(named)}"
            raise ConfigError(msg)
        found |= meant
    return found


def _repeated_blocks(named: dict[nn.Module, str]) -> set[nn.Module]:
    """Return the members of all lists of blocks of one class, but for lists inside of such blocks."""
    found: set[nn.Module] = set()
    within: set[nn.Module] = set()
    for module in named:  # parents come first
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or module in within:
            continue
        blocks = list(module)
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1 and any(blocks[0].children()):
            found.update(blocks)
            within.update(inner for block in blocks for inner in block.modules())
    return found


def _candidates(named: dict[nn.Module, str]) -> str:
    counts = Counter(type(module).__name__ for module in named if next(module.parameters(), None) is not None)
    listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(_MAX_LISTED))
    return f"Classes of its modules: {listed}."
