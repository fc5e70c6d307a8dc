"""What stages send each other in addition to the arguments of layers: found in the autograd graph of a dry run.

A model's outputs, or its later layers, may depend on earlier layers in other ways than through what one layer passes to
the next: a decoder's model returns the encoder's last state, too. Such a value is sent along where some module outside
of the layers returned it: on the stages after, what that module returns is replaced by what has been received. Modules
inside of layers, such as the routers of experts, hand values over by hooks: these are called with what has been
received.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from booster_core.errors import ConfigError
from booster_runtime.data import leaves_by_path, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_Edge: TypeAlias = tuple[Any, int]
"""A tensor in the graph: the node that made it, and which of the node's results it is."""
_SHOWN = 3


@dataclass(frozen=True)
class Extra:
    """A tensor that a module returns, and that later stages need.

    Args:
        module: Name of the module: one outside of the layers, a layer as seen from outside, or one inside of a layer,
            where hooks see what it returns.
        call: Which of its calls in one forward.
        path: Where in what it returns.
        position: How many layers had been called when it returned.
    """

    module: str
    call: int
    path: str
    position: int

    @property
    def index(self) -> int | None:
        """Its index in the tuple that the module returns; ``None`` where it is all of it."""
        return int(self.path.strip("[]")) if self.path else None

    @property
    def name(self) -> str:
        """What it is called on its way."""
        return f"{self.module}#{self.call}{self.path}"


@dataclass(frozen=True)
class Crossing:
    """What a stage gets from the one before.

    Args:
        carried: Names of arguments of its first layer.
        extras: What else it needs, or the stages after it.
        written: Those of the arguments that the stage has of its own, and that layers before it write to in place.
    """

    carried: tuple[str, ...]
    extras: tuple[Extra, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all of it."""
        return (*self.carried, *(extra.name for extra in self.extras))


@dataclass(frozen=True)
class Needs:
    """What stages get and leave out, in training or in evaluation.

    Args:
        crossings: What each stage gets from the one before.
        idle: The stages on which a module outside of the layers has nothing to compute, by its name.
        sample_dims: For paths of outputs, along which dimension they have an entry per sample; ``None`` for none.
    """

    crossings: tuple[Crossing, ...]
    idle: Mapping[str, frozenset[int]]
    sample_dims: Mapping[str, int | None] = field(default_factory=dict)


def tensors_in(value: Any) -> dict[str, torch.Tensor]:
    """Return the differentiable tensors in a nest of containers by where they are."""
    found = leaves_by_path(value)[0]
    return {path: leaf for path, leaf in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad}


class Flow:
    """The graph of a dry run, as far as cuts go through it.

    Args:
        parameters: What stands for the model's parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._names = {id(tensor): name for name, tensor in parameters.items()}
        self._parameters = parameters  # keeps the ids in use
        self._entries: list[dict[str, _Edge]] = []
        self._gates: list[set[Any]] = []
        self._made: dict[_Edge, Extra] = {}
        self._results: dict[str, _Edge] = {}

    def enter_layer(self, arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Note a layer's call, and return what to call it with in the place of these arguments.

        Args:
            arguments: Those that a stage may have to send, by path.
        """
        self._entries.append({name: edge_of(tensor) for name, tensor in arguments.items()})
        # Other uses of the same tensor don't pass through this call.
        gates = {id(tensor): tensor.view_as(tensor) for tensor in arguments.values()}
        self._gates.append({gate.grad_fn for gate in gates.values()})
        return {name: gates[id(tensor)] for name, tensor in arguments.items()}

    def leave_module(self, name: str, call: int, position: int, output: Any) -> None:
        """Note what a module returned."""
        for path, tensor in tensors_in(output).items():
            if tensor.grad_fn is not None:
                self._made.setdefault(edge_of(tensor), Extra(name, call, path, position))

    def end(self, output: Any) -> None:
        """Note what the model returned."""
        self._results = {path: edge_of(tensor) for path, tensor in tensors_of(output) if tensor.requires_grad}

    def crossings(
        self,
        ranges: Sequence[tuple[int, int]],
        is_held: Callable[[int, str], bool],
        what: str,
    ) -> tuple[Crossing, ...]:
        """Return what each stage gets.

        Args:
            ranges: The first layer of each stage, and one past its last.
            is_held: Tells by stage and name whether a parameter is there, and used in its place.
            what: What the model is called in errors.

        Raises:
            ConfigError: If a stage needs what can't be sent to it.
        """
        found: list[Crossing] = []
        needed: set[Extra] = set()
        made_at = {extra: edge for edge, extra in self._made.items()}
        for stage in range(len(ranges) - 1, -1, -1):
            first, last = ranges[stage]
            if stage == 0:
                found.append(Crossing(()))
                break
            starts = {f"its extra '{each.name}'": made_at[each] for each in needed if each.position > first}
            if stage == len(ranges) - 1:
                starts.update({f"output {path or '(all)'}": edge for path, edge in self._results.items()})
            else:
                entries = self._entries[last]
                wanted = entries.keys() - _covered(entries, {made_at[each] for each in needed})
                starts.update({f"argument '{name}' of layer {last}": entries[name] for name in sorted(wanted)})
            needed = {each for each in needed if each.position <= first}
            needed |= self._needed(starts, first, lambda name, stage=stage: is_held(stage, name), what)  # type: ignore[misc]
            edges = {made_at[each] for each in needed}
            carried = tuple(name for name in self._entries[first] if name not in _covered(self._entries[first], edges))
            found.append(Crossing(carried, tuple(sorted(needed, key=lambda each: (each.position, each.name)))))
        return tuple(reversed(found))

    def _needed(self, starts: Mapping[str, _Edge], cut: int, is_held: Callable[[str], bool], what: str) -> set[Extra]:
        """Return what a stage needs from earlier stages, other than the arguments of its first layer."""
        arrived = {*self._entries[cut].values()}
        lost = self._lost(starts.values(), self._gates[cut], arrived, is_held)
        extras: set[Extra] = set()
        missing: dict[str, str] = {}
        for label, start in starts.items():
            stack, seen = [start], set()
            while stack:
                edge = stack.pop()
                if edge in seen or edge in arrived or edge[0] not in lost:
                    continue
                seen.add(edge)
                made = self._made.get(edge)
                if made is not None and made.position <= cut:
                    extras.add(made)
                    continue
                name = self._parameter(edge[0])
                if name is not None:
                    missing.setdefault(label, name)
                stack += edge[0].next_functions
        if missing:
            listed = [f"{label} (through '{name}')" for label, name in missing.items()][:_SHOWN]
            msg = (
                f"{what} can't be cut before its layer number {cut}: {', '.join(listed)} depends on what is inside of "
                "earlier layers, in another way than through what they pass on. Turn off what asks for it, let it be "
                "collected by forward hooks on the modules that return it, or use `pp_size=1`."
            )
            raise ConfigError(msg)
        return extras

    def _lost(
        self, starts: Iterable[_Edge], gates: set[Any], arrived: set[_Edge], is_held: Callable[[str], bool]
    ) -> set[Any]:
        """Return the nodes that depend on parameters which are not held, but for dependence through what arrives."""
        lost: dict[Any, bool] = {}
        stack = [(edge[0], False) for edge in starts if edge not in arrived]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                before = (edge[0] for edge in node.next_functions if edge not in arrived)
                lost[node] = lost[node] or any(lost.get(each, False) for each in before)
            elif node is not None and node not in lost:
                name = self._parameter(node)
                lost[node] = name is not None and not is_held(name)
                if node not in gates:
                    stack.append((node, True))
                    stack += [(edge[0], False) for edge in node.next_functions if edge not in arrived]
        return {node for node, is_lost in lost.items() if is_lost}

    def _parameter(self, node: Any) -> str | None:
        variable = getattr(node, "variable", None)
        return None if variable is None else self._names.get(id(variable))


def _covered(entries: Mapping[str, _Edge], sent: set[_Edge]) -> set[str]:
    """Return the names of a layer's arguments that are sent already, as what a module returned."""
    return {name for name, edge in entries.items() if edge in sent}


def edge_of(tensor: torch.Tensor) -> _Edge:
    """Return where a differentiable tensor is in the graph: the node that made it, and which result of it."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr
