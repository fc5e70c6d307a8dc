"""What the rules of a group of linear layers may be: guesses, in order, that `check_policy` then tries out.

A group is one row-parallel layer and the column-parallel ones that feed it. How the columns must be cut (anywhere,
between heads, in blocks of fused projections) is not seen in the graph. Numbers of heads are among the attributes of
the parent modules and of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from booster_hybrid.policy.base import ModuleRule, Style
from booster_hybrid.tensor_parallel.kinds import is_transposed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

_MOST_BLOCKS = 3


@dataclass(frozen=True)
class Group:
    """A row-parallel layer and those that feed it.

    Args:
        columns: Names of these, in the order of their calls.
        row: The layer's name.
        between: Names of parameters that are used in between.
    """

    columns: tuple[str, ...]
    row: str
    between: tuple[str, ...] = ()

    def named_by(self, lists: Sequence[str]) -> Group:
        """Return the group with patterns in place of names, alike for all layers of a kind."""
        columns, between = (tuple(pattern_of(each, lists) for each in names) for names in (self.columns, self.between))
        return Group(columns, pattern_of(self.row, lists), between)


def pattern_of(name: str, lists: Sequence[str]) -> str:
    """Return a name with ``*`` in place of the number of a layer.

    Args:
        name: The name of a module or parameter.
        lists: Names of the lists of layers.
    """
    for each in lists:
        if name.startswith(f"{each}."):
            number, dot, rest = name[len(each) + 1 :].partition(".")
            return f"{each}.*{dot}{rest}" if number.isdigit() else name
    return name


def sizes_of(module: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer, in either storage order."""
    outputs, inputs = module.weight.shape
    return (outputs, inputs) if is_transposed(module) else (inputs, outputs)


def guesses(model: nn.Module, group: Group, lists: Sequence[str]) -> Iterator[tuple[ModuleRule, ...]]:
    """Yield rules that a group may need, the likelier first.

    Args:
        model: The model.
        group: The group, by names of modules.
        lists: Names of the lists of layers.
    """
    modules: Mapping[str, Any] = dict(model.named_modules())
    width, _ = sizes_of(modules[group.row])
    outputs = {name: sizes_of(modules[name])[1] for name in group.columns}
    wide = {name: size for name, size in outputs.items() if size >= width}
    if not wide or any(size % width or size // width > _MOST_BLOCKS for size in wide.values()):
        return
    narrow = [name for name in outputs if name not in wide]
    between = _between(model, group, width, lists)
    if between is None:
        return

    def made(settings: Mapping[str, Mapping[str, Any]], **of_row: Any) -> tuple[ModuleRule, ...]:
        columns = [ModuleRule(pattern_of(each, lists), Style.COLUMN, **settings[each]) for each in group.columns]
        return (*columns, *between, ModuleRule(pattern_of(group.row, lists), Style.ROW, **of_row))

    if not narrow:
        yield made({name: {"num_blocks": size // width} for name, size in wide.items()})
    parent = modules[group.columns[0].rpartition(".")[0]]
    counts = _counts(parent, model, width)
    for units, number in counts.items():
        for shared, scaled in product(_shared(counts, number) if narrow else [None], _scaled(parent, number, width)):
            yield from (
                made(settings, units=units, groups=shared)
                for settings in _by_heads(parent, wide, narrow, width, (units, number), shared, counts, scaled)
            )


def _by_heads(
    parent: nn.Module,
    wide: Mapping[str, int],
    narrow: Sequence[str],
    width: int,
    heads: tuple[str, int],
    shared: str | None,
    counts: Mapping[str, int],
    scaled: tuple[str, ...],
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield settings of columns that are cut between heads, fused ones as blocks, or with the parts of a head adjacent.

    Args:
        parent: The module that has the columns.
        wide: Those with an output for each input of the row, or several; and how many.
        narrow: Keys and values of fewer heads.
        width: Inputs of the row.
        heads: What counts heads, and how many there are.
        shared: What counts those of keys and values, where they are fewer.
        counts: What may count heads.
        scaled: Attributes of the parent that count what is here.
    """
    units, number = heads
    of_keys: dict[str, Any] = {}
    of_group: dict[str, Any] = {}
    if shared is not None:
        few = counts[shared]
        scaled_keys = _named(parent, few) if scaled else ()
        of_keys = {"units": shared, "groups": shared, "is_shared": True, "scaled": scaled_keys}
        of_group = {"groups": shared, "per_group": _named(parent, number // few)}
    for is_blocked in sorted({size > width for size in wide.values()} | {False}, reverse=True):
        blocks = {name: size // width if is_blocked else 1 for name, size in wide.items()}
        found = {name: {"units": units, "num_blocks": blocks[name], "scaled": scaled, **of_group} for name in wide}
        yield {**found, **dict.fromkeys(narrow, of_keys)}


def _shared(counts: Mapping[str, int], number: int) -> list[str]:
    return [each for each, few in counts.items() if few < number and number % few == 0]


def _between(model: nn.Module, group: Group, width: int, lists: Sequence[str]) -> list[ModuleRule] | None:
    """Return rules for the parameters of norms of single heads; ``None`` where there are others in between."""
    rules = {}
    for name in group.between:
        parameter = model.get_parameter(name)
        if parameter.dim() != 1 or parameter.numel() >= width:
            return None
        pattern = pattern_of(name, lists)
        rules[pattern] = ModuleRule(pattern, Style.SUMMED_GRADIENT)
    return list(rules.values())


def _counts(parent: nn.Module, model: nn.Module, width: int) -> dict[str, int]:
    """Return the names of numbers that may count heads: of the parent first, then of the configuration."""
    config: Any = getattr(model, "config", None)
    numbers = {name: value for name, value in vars(parent).items() if _is_number(value)}
    of_config = {} if config is None else {name: value for name, value in vars(config).items() if _is_number(value)}
    named = [(name, value) for each in (numbers, of_config) for name, value in each.items() if _counts_heads(name)]
    found: dict[str, int] = {}
    for name, value in (*named, *numbers.items()):
        if 1 < value < width and width % value == 0:
            found.setdefault(name, value)
    return found


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size"))


def _scaled(parent: nn.Module, number: int, width: int) -> list[tuple[str, ...]]:
    """Return what the parent may count of the heads that it has, and of their width."""
    heads, widths = _named(parent, number), _named(parent, width)
    return list(dict.fromkeys([(), heads, (*heads, *widths), widths]))


def _named(parent: nn.Module, number: int) -> tuple[str, ...]:
    return tuple(name for name, value in vars(parent).items() if _is_number(value) and value == number)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(rule: ModuleRule) -> str:
    """Return a rule as code."""
    parts = [repr(rule.pattern), f"Style.{rule.style.name}"]
    default = ModuleRule("", rule.style)
    names: Sequence[str] = ("units", "groups", "is_shared", "num_blocks", "scaled", "per_group")
    parts += [f"{name}={getattr(rule, name)!r}" for name in names if getattr(rule, name) != getattr(default, name)]
    return f"ModuleRule({', '.join(parts)})".replace("'", '"')
