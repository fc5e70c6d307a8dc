"""Which lists of a model are its layers, found by a dry run: those whose members run once each, one after the other.

The members of a `ModuleList`, `ModuleDict` or `Sequential` are layers if each is called once in a forward, and what
each is given depends on what the one before has returned. So experts, heads and other branches are none. Of lists
inside of each other the outermost counts, unless it has too few members to fill all stages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.arguments import LikeArguments
from booster_hybrid.pipeline.trace import CONTAINERS, call_on, run_dry, stand_ins
from booster_hybrid.tensor_parallel.module_names import peft_classes
from booster_runtime.data import leaves_by_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor, nn

_SMALL = 0.05
"""A list with a smaller part of the layers' parameters is left out where the others fill all stages."""
_SHOWN = 4


@dataclass
class _Call:
    """A call of a member of a list: what it was given and has returned in the autograd graph, and when."""

    name: str
    given: set[tuple[Any, int]]
    entered: int
    returned: set[tuple[Any, int]]
    left: int
    is_layer: bool


def find_layers(model: nn.Module, batch: Any, num_stages: int) -> list[str]:
    """Return the names of the lists whose members are layers of a model, by a dry run.

    Args:
        model: The whole model.
        batch: As its data loader yields it.
        num_stages: How many stages the layers have to fill; 0 finds the outermost lists of which all members are
            called in their order, as sequence parallelism needs them.

    Raises:
        ConfigError: If there are fewer layers than stages, or none; with the reason.
    """
    watch = _Watch(model, in_order=not num_stages)
    run_dry(model, batch, watch.run)
    reasons: dict[str, str] = {}
    chosen = watch.outermost("", reasons)
    sizes = {name: watch.numel(name) for name in chosen}
    large = [name for name in chosen if sizes[name] >= _SMALL * sum(sizes.values())]
    while large and watch.num_layers(large) < num_stages:
        finer = [each for name in large for each in watch.inside(name) or [name]]
        if watch.num_layers(finer) <= watch.num_layers(large):
            break
        large = finer
    for found in (large, chosen):
        if found and watch.num_layers(found) >= num_stages:
            return found
    raise _too_few(model, watch, chosen, num_stages, reasons)


def _too_few(
    model: nn.Module, watch: _Watch, chosen: Sequence[str], num_stages: int, reasons: Mapping[str, str]
) -> ConfigError:
    what = type(model).__name__
    if chosen:
        listed = ", ".join(f"{watch.num_layers([name])} in '{name}'" for name in chosen)
        found = f"{watch.num_layers(chosen)} layers can't fill {num_stages} stages ({what} has {listed})"
        remedy = "Use fewer stages, or fewer chunks on each rank"
    else:
        shown = [f"'{name}' ({reason})" for name, reason in reasons.items()][:_SHOWN]
        lists = f" None of its lists is: {', '.join(shown)}." if shown else " It has no list of modules."
        found = f"{what} has no list of layers that run one after the other, each once in a forward.{lists[:-1]}"
        remedy = "Put its layers into a ModuleList, ModuleDict or Sequential, or use `pp_size=1`"
    return ConfigError(f"{found}. {remedy}; `ShardingPolicy(layers=...)` names lists that were not found.")


class _Watch:
    """Notes the calls of the members of all lists of a model."""

    def __init__(self, model: nn.Module, *, in_order: bool) -> None:
        self._model, self._in_order = model, in_order
        self._modules = dict(model.named_modules())
        name_of = {id(module): name for name, module in self._modules.items()}
        adapters = _lists_of_adapters(self._modules.values())
        self._lists = {
            name: {name_of[id(child)]: child for child in module.children()}
            for name, module in self._modules.items()
            if isinstance(module, CONTAINERS) and id(module) not in adapters
        }
        self._calls: dict[str, list[_Call]] = {}
        self._open: list[_Call] = []
        self._time = 0

    def run(self, make: Callable[[Tensor], Tensor], batch: Any) -> None:
        """Run the model on stand-ins; see `run_dry`."""
        self._calls, self._open, self._time = {}, [], 0
        tensors = stand_ins(self._model, make)
        members = {name: module for each in self._lists.values() for name, module in each.items()}
        handles = []
        for name, module in members.items():
            enter = functools.partial(self._enter, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, prepend=True))
        try:
            call_on(self._model, tensors, batch)
        finally:
            for handle in handles:
                handle.remove()

    def outermost(self, name: str, reasons: dict[str, str]) -> list[str]:
        """Return the lists of layers in a module, or itself; note why others are none."""
        if name in self._lists:
            reason = self._reason(name)
            if reason is None:
                return [name]
            reasons[name] = reason
        return [each for child in self._children(name) for each in self.outermost(child, reasons)]

    def inside(self, name: str) -> list[str]:
        """Return the lists of layers in the members of a list."""
        return [each for member in self._lists[name] for each in self.outermost(member, {})]

    def num_layers(self, lists: Iterable[str]) -> int:
        """Return how many layers are called of some lists."""
        return sum(name in self._calls for each in lists for name in self._lists[each])

    def numel(self, name: str) -> int:
        """Return the number of elements of a list's parameters."""
        return sum(each.numel() for each in self._modules[name].parameters())

    def _children(self, name: str) -> list[str]:
        prefix = f"{name}." if name else ""
        return [prefix + key for key, _ in self._modules[name].named_children() if prefix + key in self._modules]

    def _reason(self, name: str) -> str | None:
        """Return why the members of a list are no layers; ``None`` if they are."""
        calls = sorted(
            (call for member in self._lists[name] for call in self._calls.get(member, ())),
            key=lambda call: call.entered,
        )
        if not calls or not self.numel(name):
            return "no member has parameters" if calls else "no member is called"
        names = [call.name for call in calls]
        if self._in_order and names != [*self._lists[name]]:
            return "not each of its members is called, in their order"
        pairs = zip([None, *calls], calls, strict=False)
        return next((found for pair in pairs if (found := _objection(*pair, names.count(pair[1].name)))), None)

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = _edges((args, kwargs))
        call = _Call(name, given, self._time, set(), self._time, is_layer=False)
        self._time += 1
        self._open.append(call)
        self._calls.setdefault(name, []).append(call)

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        call = self._open.pop()
        call.returned = _edges(output)
        call.left = self._time
        self._time += 1
        call.is_layer = LikeArguments.like(output, {}) is not None


def _lists_of_adapters(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ``id`` of the modules in which peft keeps the adapters and copies of a layer, by their names."""
    kinds: tuple[type, ...] = sum(peft_classes(), ())
    return {id(child) for module in modules if isinstance(module, kinds) for child in module.children()}


def _objection(before: _Call | None, call: _Call, count: int) -> str | None:
    """Return why a call of a list's member, after that of another one, is none of a layer."""
    if count > 1:
        return f"'{call.name}' is called {count} times"
    if not call.is_layer:
        return f"'{call.name}' returns no tensor, or plain tuple with one"
    if before is not None and call.entered < before.left:
        return f"'{call.name}' is called inside of '{before.name}'"
    if before is not None and not _reaches(call.given, before.returned):
        return f"what '{call.name}' is given does not depend on what '{before.name}' returns"
    return None


def _edges(value: Any) -> set[tuple[Any, int]]:
    """Return where the differentiable tensors of a nest of containers are in the autograd graph: node and result."""
    leaves = (leaf for _, leaf in leaves_by_path(value)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    edges = [torch.autograd.graph.get_gradient_edge(leaf) for leaf in leaves]
    return {(edge.node, edge.output_nr) for edge in edges}


def _reaches(start: set[tuple[Any, int]], goal: set[tuple[Any, int]]) -> bool:
    """Return whether a value of a graph depends on another one."""
    if start & goal:
        return True
    nodes = {node for node, _ in goal}
    stack, seen = [node for node, _ in start], set()
    while stack:
        node = stack.pop()
        if node in nodes:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            stack += [each for each, _ in node.next_functions]
    return False
