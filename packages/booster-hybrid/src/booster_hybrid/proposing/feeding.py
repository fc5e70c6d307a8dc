"""Which linear layers of a model feed each other, as seen in the graph that autograd keeps of one forward.

From a layer's input one walks back to the nearest outputs of other layers. A layer that is reached from column-parallel
ones alone, whose outputs go nowhere else, can be their row-parallel partner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from booster_core.state import NamedTensors, named_modules
from booster_hybrid.tensor_parallel.kinds import is_linear
from booster_runtime.data import call_with, taken_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

OUTPUT = ""
"""What stands for the outputs of the model among the names of layers."""


@dataclass
class Feeding:
    """What one forward has shown.

    Attributes:
        order: Names of the linear layers and embeddings, in the order of their first calls.
        sources: For each of them, and for `OUTPUT`, the layers whose outputs reach its input without passing another.
        between: The parameters that are used on the way from these, by name.
        others: Whether something else than layers reaches it: the model's input, or parameters of two dimensions.
    """

    order: list[str] = field(default_factory=list)
    sources: dict[str, set[str]] = field(default_factory=dict)
    between: dict[str, set[str]] = field(default_factory=dict)
    others: dict[str, bool] = field(default_factory=dict)

    def readers(self, name: str) -> set[str]:
        """Return what reads the output of a layer.

        Args:
            name: The layer.
        """
        return {reader for reader, sources in self.sources.items() if name in sources}


def trace_feeding(model: nn.Module, batch: Any) -> Feeding:
    """Run a model once, and return which of its layers feed each other.

    Args:
        model: The model, whose parameters get no gradients and keep their values.
        batch: As its data loader yields it.

    Collective: none.
    """
    layers = {name: module for name, _, module in named_modules(model) if _is_layer(module)}
    recorder = _Recorder(NamedTensors.of(model).name_of)
    handles: list[Any] = []
    for name, module in layers.items():
        handles.append(module.register_forward_pre_hook(recorder.entering(name)))
        handles.append(module.register_forward_hook(recorder.leaving(name)))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    was_training = model.training
    model.eval()
    try:
        for parameter in frozen:
            if parameter.is_floating_point():
                parameter.requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            recorder.end(call_with(model, taken_by(model, batch)))
    finally:
        for handle in handles:
            handle.remove()
        for parameter in frozen:
            parameter.requires_grad = False
        model.train(was_training)
    return recorder.feeding


def _is_layer(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, nn.Embedding)


class _Recorder:
    def __init__(self, name_of: dict[int, str] | Any) -> None:
        self._name_of = name_of
        self._made_by: dict[Any, str] = {}
        self.feeding = Feeding()

    def entering(self, name: str) -> Any:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._reach(name, args)

        return enter

    def leaving(self, name: str) -> Any:
        def leave(_: nn.Module, __: Any, output: Any) -> Any:
            if name not in self.feeding.order:
                self.feeding.order.append(name)
            if not isinstance(output, torch.Tensor) or output.grad_fn is None:
                return output
            # A node of its own: of a layer in two storage orders the last node is that of a view.
            marked = output.view_as(output)
            self._made_by[marked.grad_fn] = name
            return marked

        return leave

    def end(self, outputs: Any) -> None:
        leaves = pytree.tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
        self._reach(OUTPUT, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def _reach(self, name: str, tensors: Iterable[Any]) -> None:
        sources = self.feeding.sources.setdefault(name, set())
        between = self.feeding.between.setdefault(name, set())
        self.feeding.others.setdefault(name, False)
        for kind, found in self._walk(each.grad_fn for each in tensors if isinstance(each, torch.Tensor)):
            if kind == "layer":
                sources.add(found)
            elif kind == "parameter":
                between.add(found)
            else:
                self.feeding.others[name] = True

    def _walk(self, nodes: Iterable[Any]) -> Iterator[tuple[str, str]]:
        """Yield what is met on the way back from some nodes."""
        waiting, seen = [node for node in nodes if node is not None], set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._made_by:
                yield "layer", self._made_by[node]
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                known = self._name_of.get(id(leaf))
                yield ("parameter", known) if known is not None else ("other", "")
            waiting += [each for each, _ in node.next_functions if each is not None]
