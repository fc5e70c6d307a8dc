"""Reads of parameters of which each rank has a part, elsewhere than where they are split: they raise.

A penalty on such parameters, or logits made of a table, would be those of a part, without a sign. `DirectWeightUses`
finds them in the graph of a loss. A `SplitTable` raises at once: only the layer that has it may look words up or
multiply by it. Copies and views that are made of it elsewhere are `SplitCopy`s, which are as restricted.
"""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import ConfigError
from booster_core.state import NamedTensors
from booster_hybrid.torch_functions import name_of
from booster_runtime.memory import is_absent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from booster_hybrid.state import LocalModel

_READS = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "inner", "einsum", "tensordot"),
        *("__matmul__", "__rmatmul__", "t", "T", "mT", "transpose", "permute", "swapaxes", "linear_cross_entropy"),
        *("embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim"),
        *("cosine_similarity", "cdist", "pairwise_distance"),
    }
)
"""Products and distances, what is done for one, and lookups."""
_COPIES = frozenset(
    {
        *("data", "detach", "clone", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda"),
        *("contiguous", "view", "view_as", "reshape", "normalize", "__getitem__"),
        *("mul", "__mul__", "__rmul__", "div", "__truediv__"),
    }
)
"""What may return the same words, in other memory or another form."""


class _Running(threading.local):
    """How many calls of layers that have tables are under way on this thread."""

    depth = 0


_running = _Running()


class _SomeWords:
    """What comes before the class of a tensor of which this rank has the rows of some words.

    Logits made of it outside of its layer would be those of some words, and a lookup would find others. Autograd would
    not tell where no gradients are recorded.
    """

    table_name: str = "weight"
    has_plain_memory = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function as on any tensor.

        Raises:
            ConfigError: If it multiplies by the table, or looks words up, outside of the layer that has it.
        """
        is_outside = not torch.compiler.is_compiling() and not _running.depth
        name = name_of(func) if is_outside else ""
        table: Any = None
        if name in _READS or name in _COPIES or name == "__setitem__":
            in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - no public name
            given = () if in_backward else (*args, *(kwargs or {}).values())
            table = next((each for each in given if isinstance(each, _SomeWords)), None)
        if table is not None and (name in _READS or (args[0] is table and _looks_up(name, args))):
            raise outside_of_layer(table.table_name, name)
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            is_copy = name in _COPIES and args[0] is table and type(result) is torch.Tensor and result.dim() > 1
            is_recorded = is_copy and torch.is_grad_enabled() and result.requires_grad
            return _copy_of(result, table.table_name) if is_copy and not is_recorded else result


class SplitTable(_SomeWords, nn.Parameter):
    """An embedding's or output head's weight."""


class SplitCopy(_SomeWords, torch.Tensor):
    """Values of one, without gradients; what a graph is recorded of is found in the graph of the loss."""

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """Return another one."""
        with DisableTorchFunctionSubclass():
            return _copy_of(self.as_subclass(torch.Tensor).clone(), self.table_name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be saved as a plain tensor."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _copy_of(values: torch.Tensor, name: str) -> SplitCopy:
    made = values.as_subclass(SplitCopy)
    made.table_name = name
    return made


def _looks_up(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call reads or writes rows of a table by their number, which is another one on each rank."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    return first is not Ellipsis and first is not None and first != slice(None)


class DirectWeightUses:
    """Finds what a loss reads of parameters of which each rank has a part, elsewhere than where they are split.

    That is what was computed outside of the model's forward, but by a layer. Products with tables, and lookups in them,
    raise by themselves (`SplitTable`), in forward as well.

    Args:
        model: The user's model, split.
        parts: Names of such parameters, by ``id``.
    """

    def __init__(self, model: nn.Module, parts: Mapping[int, str]) -> None:
        self._parts = parts
        self._tables = watch_tables(model, parts)
        self._spans: list[tuple[int, int]] = []
        self._start = 0

    def begin(self) -> None:
        """Begin a forward of the model."""
        self._start = _next_number()

    def end(self) -> None:
        """End it."""
        self._spans.append((self._start, _next_number()))
        del self._spans[:-_MOST_SPANS]

    def check(self, loss: Tensor) -> None:
        """Raise if something in the graph of a loss reads such a parameter where it is not split.

        Raises:
            ConfigError: If so, on all ranks.
        """
        if loss.grad_fn is None or not self._spans:
            return
        for node, key in self._readers(loss.grad_fn):
            is_lookup = key in self._tables and node.name().startswith("EmbeddingBackward")
            if not (is_lookup or _is_ours(node) or self._is_inside(node)):
                raise outside_of_layer(self._parts[key], node.name())

    def _readers(self, root: Any) -> Iterator[tuple[Any, int]]:
        """Yield the nodes outside of the model's forward that read such parameters, with a parameter's ``id``."""
        waiting, seen = [root], {root}
        while waiting:
            node = waiting.pop()
            for following, _ in node.next_functions:
                key = id(getattr(following, "variable", None))
                if key in self._parts:
                    yield node, key
                elif following is not None and following not in seen and not self._is_inside(following):
                    seen.add(following)
                    waiting.append(following)

    def _is_inside(self, node: Any) -> bool:
        """Return whether a node was made in a forward of the model."""
        number = node._sequence_nr()  # noqa: SLF001 - no public way to tell when a node was made
        place = bisect.bisect_left(self._spans, (number, 0)) - 1
        return place >= 0 and number < self._spans[place][1]


_MOST_SPANS = 4096
"""Forwards that a loss may come of."""


def _is_ours(node: Any) -> bool:
    """Return whether a node is of a function that takes a part for a part: Booster's, or what it has compiled."""
    if node.name().startswith("CompiledFunction"):
        return True
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and function.__module__.startswith("booster_")


def _next_number() -> int:
    """Return the number that autograd gives to the next node of this thread."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    number: int = node._sequence_nr()  # noqa: SLF001 - no public way to tell when a node was made
    return number


def parts_of(model: nn.Module, local: LocalModel) -> dict[int, str]:
    """Return the names of the parameters of which this rank has a part, by ``id``.

    Args:
        model: The user's model, split.
        local: What is here of it.
    """
    names = NamedTensors.of(model).name_of
    shapes = local.whole_shapes(model)
    return {
        id(each): names[id(each)]
        for each in model.parameters()
        if not is_absent(each) and tuple(each.shape) != shapes[names[id(each)]]
    }


def watch_tables(model: nn.Module, parts: Mapping[int, str]) -> set[int]:
    """Make split tables `SplitTable`s, in place; return their ids.

    Args:
        model: The user's model, split.
        parts: Names of the parameters of which this rank has a part, by ``id``.
    """
    tables = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or getattr(module.forward, "vocabulary", None) is not None:
            held = [each for each in module.parameters(recurse=False) if id(each) in parts and each.dim() > 1]
            for each in held:
                if type(each) is nn.Parameter:
                    each.__class__ = SplitTable
                    each.table_name = parts[id(each)]  # type: ignore[attr-defined]
                tables.add(id(each))
            if held:
                module.register_forward_pre_hook(_enter, prepend=True)
                module.register_forward_hook(_leave, always_call=True)
    return tables


def outside_of_layer(name: str, what: str) -> ConfigError:
    """Return the error for a part of a parameter that is read where it is not split.

    Args:
        name: Of the parameter.
        what: The function that reads it.
    """
    return ConfigError(
        f"The script reads parameter '{name}' outside of the layer that has it ({what}), and each rank has a part: "
        "a penalty on it, or logits made of it, would be those of a part. Call the layer, or `linear_cross_entropy` "
        "with it; for a penalty use the optimizer's `weight_decay`, or leave out the parameters that have another "
        "shape here than in your own model. `unchecked='allow'` takes parts for whole."
    )


def _enter(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        _running.depth += 1


def _leave(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        _running.depth -= 1
