"""`SplitTable`: a parameter of which each rank has some words; only the layer that has it may look up or multiply."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from booster_core.errors import ConfigError
from booster_hybrid.torch_functions import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_READS = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "inner", "einsum", "tensordot"),
        *("__matmul__", "__rmatmul__", "t", "T", "mT", "transpose", "permute", "swapaxes", "linear_cross_entropy"),
        *("embedding", "embedding_bag", "index_select", "gather", "take", "take_along_dim"),
    }
)
"""Products, what is done for one, and lookups."""


class _Running(threading.local):
    """How many calls of layers that have tables are under way on this thread."""

    depth = 0


_running = _Running()


class SplitTable(nn.Parameter):
    """An embedding's or output head's weight, of which this rank has the rows of some words.

    Logits made of it elsewhere would be those of some words, and a lookup would find others. Autograd would not tell
    where no gradients are recorded.
    """

    table_name: str = "weight"
    has_plain_memory = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function as on any parameter.

        Raises:
            ConfigError: If it multiplies by the table, or looks words up, outside of the layer that has it.
        """
        if not torch.compiler.is_compiling() and not _running.depth and _reads(func, args):
            in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - no public name
            table = next((each for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)), None)
            if table is not None and not in_backward:
                raise outside_of_layer(table.table_name, name_of(func))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _reads(func: Any, args: tuple[Any, ...]) -> bool:
    name = name_of(func)
    return name in _READS or (name == "__getitem__" and isinstance(args[1], torch.Tensor))


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
        f"The loss reads parameter '{name}' outside of the layer that has it ({what}), and each rank has a part of it: "
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
