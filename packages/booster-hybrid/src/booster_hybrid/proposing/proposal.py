"""`propose`: a sharding policy for a model, of rules that were tried out on each kind of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid.policy.base import ModuleRule, ShardingPolicy, Style
from booster_hybrid.policy.check import check_policy
from booster_hybrid.policy.from_transformers import vocabulary_rules
from booster_hybrid.proposing.feeding import OUTPUT, Feeding, trace_feeding
from booster_hybrid.proposing.guesses import Group, guesses, pattern_of, shown, sizes_of
from booster_hybrid.tensor_parallel.kinds import is_linear

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Proposal:
    """A policy, and what it leaves whole.

    Args:
        policy: The rules that were found.
        whole: Patterns of the linear layers and embeddings that no rule splits, each with the reason.
        share: Fraction of the model's parameters that the rules split.
    """

    policy: ShardingPolicy
    whole: Mapping[str, str]
    share: float

    @property
    def code(self) -> str:
        """Python code that defines ``policy``."""
        lines = ["from booster_hybrid import ModuleRule, ShardingPolicy, Style", "", "policy = ShardingPolicy("]
        lines += ["    rules=(", *(f"        {shown(rule)}," for rule in self.policy.rules), "    ),"]
        if self.policy.layers:
            names = ", ".join(f'"{name}"' for name in self.policy.layers)
            lines.append(f"    layers=({names},),")
        return "\n".join([*lines, ")"])


def propose(model: nn.Module, batch: Any, size: int = 2) -> Proposal:
    """Return a policy that splits as much of a model as could be shown to be right.

    Each group of layers is compared whole and split, on random weights and inputs, as `boost` does with a policy of the
    user's own (docs/sharding-policies.md). Gradients are not compared here: that is what `booster_tools.verify` is for.

    Args:
        model: The model, which is run once, and neither trained nor changed.
        batch: As its data loader yields it.
        size: Number of tensor parallel ranks.

    Raises:
        ConfigError: If no group of layers can be split.

    Collective: none.
    """
    feeding = trace_feeding(model, batch)
    modules: dict[str, Any] = dict(model.named_modules())
    whole: dict[str, str] = {}
    rules: list[ModuleRule] = []
    lists = _lists(model, feeding)
    layers = tuple(name for name in lists if isinstance(modules[name], nn.ModuleList))
    done: set[Group] = set()
    for group in _groups(feeding, modules):
        pattern = group.named_by(lists)
        if pattern in done:
            continue
        done.add(pattern)
        found, reason = _tried(model, batch, group, lists, layers, size)
        rules += found
        if not found:
            whole.update(dict.fromkeys((*pattern.columns, pattern.row), reason))
    rules += _of_vocabulary(model, feeding, modules)
    placed = {rule.pattern for rule in rules}
    for name in feeding.order:
        if pattern_of(name, lists) not in placed:
            whole.setdefault(pattern_of(name, lists), _why_alone(name, feeding, modules))
    never = [name for name, module in modules.items() if is_linear(module) and name not in feeding.order]
    whole.update({pattern_of(name, lists): "it was not called for this batch" for name in never})
    if not any(rule.style is Style.ROW for rule in rules):
        reasons = "; ".join(f"'{name}': {reason}" for name, reason in list(whole.items())[:6])
        msg = f"No linear layers of {type(model).__name__} could be split ({reasons}). Write a policy by hand."
        raise ConfigError(msg)
    rules = list(dict.fromkeys(rules))
    split = {
        id(each): each.numel()
        for name, module in modules.items()
        if pattern_of(name, lists) in placed
        for each in module.parameters(recurse=False)
    }
    total = sum(each.numel() for each in model.parameters())
    return Proposal(ShardingPolicy(tuple(rules), layers), whole, sum(split.values()) / total)


def _groups(feeding: Feeding, modules: Mapping[str, Any]) -> list[Group]:
    """Return layers that are reached from other linear layers alone, whose outputs go nowhere else."""
    found, rows = [], set()
    for row in feeding.order:
        sources = feeding.sources[row]
        if not is_linear(modules[row]) or not sources or feeding.others[row]:
            continue
        is_closed = all(
            is_linear(modules[name]) and name not in rows and feeding.readers(name) == {row} for name in sources
        )
        if is_closed:
            rows.add(row)
            columns = tuple(name for name in feeding.order if name in sources)
            found.append(Group(columns, row, tuple(sorted(feeding.between[row]))))
    return found


def _tried(
    model: nn.Module, batch: Any, group: Group, lists: tuple[str, ...], layers: tuple[str, ...], size: int
) -> tuple[list[ModuleRule], str]:
    """Return the first guess of a group's rules that computes the same, or the reason why there is none."""
    if "*" not in group.named_by(lists).row.split("."):
        return [], "it is in no list of layers, which is where layers are compared whole and split"
    reason = "parameters between these layers, or their sizes, fit no known scheme"
    fitting: list[ModuleRule] = []
    for rules in guesses(model, group, lists):
        fits, reason_against = _fits(model, batch, rules, layers, size)
        if fits and _fits(model, batch, rules, layers, size + 1)[0]:
            return list(rules), ""
        if fits and (not fitting or fitting[-1].units is None):
            fitting = list(rules)  # without units it may cut between heads by chance; there may be too few for one more
        reason = reason_against or reason
    return fitting, reason


def _fits(
    model: nn.Module, batch: Any, rules: tuple[ModuleRule, ...], layers: tuple[str, ...], size: int
) -> tuple[bool, str]:
    """Return whether some rules are right on a number of ranks, or else why they are not known to be."""
    policy = ShardingPolicy(rules, layers)
    try:
        unchecked = check_policy(model, policy, size, torch.device("cpu"), batch=lambda: batch)
    except ConfigError as error:
        sentence = str(error).partition(": ")[2].partition(". ")[0]
        return False, f"each way to split it that was tried changes what its layer computes ({sentence})"
    reason = f"splitting it could not be checked: {next(iter(unchecked.values()))}" if unchecked else ""
    return not unchecked, reason


def _of_vocabulary(model: nn.Module, feeding: Feeding, modules: Mapping[str, Any]) -> list[ModuleRule]:
    """Return rules for the embedding of tokens and the head, where the head makes what the model returns."""
    if found := vocabulary_rules(model):
        return found
    tables = {name: each for name, each in modules.items() if isinstance(each, nn.Embedding)}
    for name in feeding.sources.get(OUTPUT, ()):
        if not is_linear(modules[name]) or len(feeding.sources[OUTPUT]) != 1:
            continue
        _, size = sizes_of(modules[name])
        alike = [table for table, each in tables.items() if each.num_embeddings == size]
        if alike:
            return [*(ModuleRule(each, Style.VOCABULARY) for each in alike), ModuleRule(name, Style.HEAD)]
    return []


def _why_alone(name: str, feeding: Feeding, modules: Mapping[str, Any]) -> str:
    if isinstance(modules[name], nn.Embedding):
        return "an embedding whose rows are not those of the head"
    readers = feeding.readers(name)
    if OUTPUT in readers:
        return "its outputs are returned by the model"
    if len(readers) > 1:
        return f"its outputs are read by {len(readers)} layers"
    return "no other linear layers alone feed it, or are fed by it"


def _lists(model: nn.Module, feeding: Feeding) -> tuple[str, ...]:
    """Return the outermost lists of modules of one class that have linear layers."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(each) for each in module}) == 1
        inside = any(each.startswith(f"{name}.") and not is_linear(module[0]) for each in feeding.order if is_list)
        if inside and not any(name.startswith(f"{each}.") for each in found):
            found.append(name)
    return tuple(found)
